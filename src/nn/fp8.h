#pragma once

#include <tessera/nn/fp8.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

/// A linear layer in float8. See Note [scaled products].
namespace tessera::nn::detail {

constexpr int64_t kFp8Multiple = 16;  // sizes of matrices in _scaled_mm are multiples of this

/// The largest magnitudes of a tensor in the last calls, newest first; zeros: none yet.
class AmaxHistory {
 public:
  explicit AmaxHistory(int64_t length) : length_(length) {}
  /// On the device of `like`, to which it moves.
  at::Tensor& values(const at::Tensor& like);
  void push(const at::Tensor& amax);

 private:
  int64_t length_;
  at::Tensor values_;
};

/// Of one layer.
struct Fp8Layer : torch::CustomClassHolder {
  explicit Fp8Layer(const Fp8Options& options)
      : scaling(options.scaling),
        amax(options.amax),
        input(options.history),
        weight(options.history),
        gradient(options.history) {}

  Fp8Scaling scaling;
  Fp8Amax amax;
  AmaxHistory input, weight, gradient;
};
using Fp8LayerPtr = c10::intrusive_ptr<Fp8Layer>;

at::Tensor fp8_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const Fp8LayerPtr& layer);

/// Throws libtorch's error if the device has no such products.
void try_fp8_product(c10::Device device, Fp8Scaling scaling);

/// Sums of columns of 16 bits, added up in and written as `dtype`.
at::Tensor sum_of_rows(const at::Tensor& rows, at::ScalarType dtype);

}  // namespace tessera::nn::detail
