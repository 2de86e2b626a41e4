// Steps that were written for one device, to be run by many.
#pragma once

#include <tessera/compile.h>
#include <tessera/dtensor.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "compose/on_device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// Parameters and buffers, and a function of them that gives a loss and an output.
struct PartsImpl : torch::nn::Module {
  Tensors p, b;
  std::function<Tensors(PartsImpl&, const Tensors&)> function;
  void parameter(Tensor values) {
    p.push_back(register_parameter("p" + std::to_string(p.size()), std::move(values)));
  }
  void buffer(Tensor values) {
    b.push_back(register_buffer("b" + std::to_string(b.size()), std::move(values)));
  }
  Tensors forward(Tensors given) { return function(*this, given); }
};
TESSERA_MODULE(Parts);

struct ParallelCase {
  std::string name;
  std::function<void(PartsImpl&)> make;
  std::function<Tensors(PartsImpl&, const Tensors&)> forward;
  /// Arguments of a batch of this many samples.
  std::function<Tensors(int64_t)> draw;
  std::vector<std::optional<int64_t>> dims = {0, 0};  // of the arguments
  int64_t output_dim = 0;                             // the output's batch; -1: it has none
  int64_t per_sample = 1;                             // how much of that dimension a sample has
};

/// Options of tensors on the run's device.
inline auto real() { return torch::TensorOptions(torch::kDouble).device(run_device()); }
inline auto integer() { return real().dtype(torch::kLong); }

inline Parts make_parts(const ParallelCase& of) {
  torch::manual_seed(1);
  Parts net;
  of.make(*net);
  net->function = of.forward;
  return net;
}

inline std::unique_ptr<torch::optim::Optimizer> optimizer_for(Parts& net, bool adam) {
  if (adam)
    return std::make_unique<optim::AdamW>(net->parameters(), optim::AdamWOptions{.lr = 0.01});
  return std::make_unique<optim::SGD>(net->parameters(),
                                      optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
}

inline Tensors train_parts(Parts& net, torch::optim::Optimizer& optimizer, Tensors given) {
  optimizer.zero_grad();
  auto results = net(given);
  results[0].backward();
  optimizer.step();
  return results;
}

inline Tensor gathered(const Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor.detach();
  return DTensor::of(tensor).redistribute({Replicate()}).to_local().detach();
}

/// This rank's samples of a batch.
inline Tensors part_of_batch(const ParallelCase& of, const Tensors& whole,
                             const std::vector<int64_t>& lengths, int rank) {
  int64_t begin = 0;
  for (int i = 0; i < rank; ++i) begin += lengths[static_cast<size_t>(i)];
  Tensors parts;
  for (size_t i = 0; i < whole.size(); ++i) {
    const auto dim = of.dims[i];
    const auto own = lengths[static_cast<size_t>(rank)];
    parts.push_back(dim ? whole[i].narrow(*dim, begin, own).clone() : whole[i]);
  }
  return parts;
}

inline void expect_near(const Tensor& actual, const Tensor& wanted, const std::string& what) {
  ASSERT_EQ(actual.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(torch::allclose(actual, wanted, 1e-12, 1e-12))
      << what << ": " << (actual - wanted).abs().max().item<double>() << "\n"
      << actual << "\n"
      << wanted;
}

}  // namespace tessera::testing
