#include "compose/drawn_training.h"

#include <tessera/nn.h>

#include <optional>
#include <unordered_set>

namespace tessera::testing {
namespace {

/// Rounds a tree's parameters into the copy's, and sends the copy's gradients back.
class LowCopy {
 public:
  LowCopy(Part copy, const Trainee& original) : copy_(std::move(copy)) {
    copy_.module->to(torch::kBFloat16);
    const auto parameters = trainee_of(copy_).parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& to = original.parameters[i].second;
      pairs_.emplace_back(parameters[i].second, to);
      if (!to.requires_grad()) continue;
      register_post_accumulate_grad_hook(parameters[i].second, [to](const at::Tensor& low) {
        const torch::NoGradGuard no_grad;
        const auto gradient = low.grad().to(torch::kDouble);
        auto& sum = to.mutable_grad();
        sum = sum.defined() ? sum + gradient : gradient;
        low.mutable_grad() = at::Tensor();
      });
    }
  }

  at::Tensor forward(const at::Tensor& x) const {
    {
      const torch::NoGradGuard no_grad;
      for (const auto& [low, high] : pairs_) low.set_data(high.detach().to(torch::kBFloat16));
    }
    return copy_.call(x.to(torch::kBFloat16)).to(torch::kDouble);
  }

 private:
  Part copy_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

}  // namespace

Trainee trainee_of(const Part& root) {
  Trainee result{.forward =
                     [root](const at::Tensor& x) {
                       return root.call(x.to(torch::kDouble)).to(torch::kDouble);
                     },
                 .parameters = {}};
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : root.module->named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.parameters.emplace_back(item.key(), item.value());
  }
  return result;
}

Trainee low_reference(const std::function<Part()>& make, int64_t ranks) {
  auto result = trainee_of(make());
  std::vector<LowCopy> copies;
  for (int64_t rank = 0; rank < ranks; ++rank) copies.emplace_back(make(), result);
  result.forward = [copies](const at::Tensor& x) {
    const auto parts = x.chunk(static_cast<int64_t>(copies.size()));
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < copies.size(); ++i) outputs.push_back(copies[i].forward(parts[i]));
    return at::cat(outputs);
  };
  return result;
}

Trainee in_two_batches(Trainee trainee, int64_t ranks,
                       std::shared_ptr<torch::nn::Module> parallel) {
  trainee.forward = [forward = trainee.forward, ranks, parallel](const at::Tensor& x) {
    const auto halves = x.view({ranks, 2, -1, x.size(1)});
    const auto half = [&](int64_t index) {
      return halves.select(1, index).reshape({-1, x.size(1)});
    };
    {
      std::optional<NoSync> no_sync;
      if (parallel) no_sync.emplace(*parallel);
      forward(half(0)).square().mean().backward();
    }
    return forward(half(1));
  };
  return trainee;
}

}  // namespace tessera::testing
