#pragma once

#include <tessera/nn.h>

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

/// Modules whose forwards take and return all kinds of things.
namespace tessera::testing {

inline const at::Tensor kOnes = at::ones({2, 2});

struct DoubleImpl : torch::nn::Cloneable<DoubleImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return x * 2; }
};
TESSERA_MODULE(Double);

struct Batch {
  at::Tensor x;
  std::vector<at::Tensor> more;
  std::string note;
};
inline void tessera_tensors(Batch& batch, auto&& visit) { visit(batch.x, batch.more); }

/// forward returns its argument, whatever the type.
template <class T>
struct EchoImpl : torch::nn::Module {
  T forward(T value) { return value; }
};
using BatchEchoImpl = EchoImpl<Batch>;
TESSERA_MODULE(BatchEcho);

struct NamedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale) {
    return (mask ? x * *mask : x) * scale;
  }
};
TESSERA_MODULE(Named, "x", "mask", "scale");

/// Defaults, as AnyModule and as a user sees them.
struct DefaultsImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x, double scale = 3, int64_t offset = 1) {
    return x * scale + offset;
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(3.0)}, {2, torch::nn::AnyValue(int64_t(1))})
};
TESSERA_MODULE(Defaults);

struct MoveOnlyImpl : torch::nn::Module {
  int forward(std::unique_ptr<int> number, std::unique_ptr<int>&& other) {
    return *number + *other;
  }
};
TESSERA_MODULE(MoveOnly);

struct ReferencesImpl : torch::nn::Module {
  void forward(at::Tensor& out, const std::unique_ptr<int>& number, std::string* text) {
    out = out + *number;
    *text += "called";
  }
};
TESSERA_MODULE(References);

struct ConstImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) const { return x + 1; }
};
TESSERA_MODULE(Const);

struct QuietImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) noexcept { return x; }
};
TESSERA_MODULE(Quiet);

struct TwoImpl : torch::nn::Module {
  std::tuple<at::Tensor, std::map<std::string, at::Tensor>, int> forward(const at::Tensor& x) {
    return {x, {{"twice", x * 2}}, 7};
  }
};
TESSERA_MODULE(Two);

struct FailingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(!fails, "forward failed");
    return x;
  }
  bool fails = true;
};
TESSERA_MODULE(Failing);

/// Entry points besides forward; `fill` is overloaded.
struct CoderImpl : torch::nn::Module {
  explicit CoderImpl(double scale = 2) : scale(scale) {}
  at::Tensor forward(at::Tensor x) { return decode(encode(std::move(x))); }
  at::Tensor encode(at::Tensor x, int64_t times = 1) { return x * (scale * times); }
  at::Tensor decode(const at::Tensor& x) const { return x / scale; }
  void add_to(at::Tensor& out, double value) { out = out + value; }
  at::Tensor fill(at::Tensor x) { return x.fill_(1); }
  at::Tensor fill(at::Tensor x, int64_t value) { return x + value; }
  double scale;
};
TESSERA_MODULE(Coder);
TESSERA_MODULE_METHOD(Coder, encode, decode, add_to, fill);

struct OneMethodImpl : torch::nn::Module {
  int forward(int x) { return x; }
  int more(int x) { return x + 1; }
};
TESSERA_MODULE_METHOD(OneMethod, more);
TESSERA_MODULE(OneMethod);

}  // namespace tessera::testing
