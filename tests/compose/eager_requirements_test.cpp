// REQUIREMENTS.md 1.3, the eager halves of its tests: `replicate` and the wrapper, with and without
// checkpointing and comm hooks, train alike.
#include <tessera/checkpoint.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

constexpr int64_t kWidth = 2000;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool checkpoints = false) : checkpoints(checkpoints) {
    fc1 = register_module("fc1", nn::Linear(kWidth, kWidth));
    fc2 = register_module("fc2", nn::Linear(kWidth, kWidth));
    fc3 = register_module("fc3", nn::Linear(kWidth, kWidth));
    fc4 = register_module("fc4", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto first = checkpoints ? checkpoint_call(fc1, x) : fc1(x);
    return fc4(fc3(fc2(first)));
  }
  nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr}, fc4{nullptr};
  bool checkpoints;
};
TESSERA_MODULE(Net);

at::Tensor input_of(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(123 + rank + step);
  return at::randn({1, kWidth}, generator).to(run_device());
}

struct Case {
  const char* name;
  bool no_sync = false;
  bool checkpoints = false;
  CommHook hook = {};
  std::optional<c10::ScalarType> dtype = std::nullopt;  // of the hook
};
void PrintTo(const Case& which, std::ostream* out) { *out << which.name; }  // NOLINT: gtest's name

const Case kCases[] = {{"R_003_1_Plain"},
                       {"R_003_2_NoSync", true},
                       {"R_003_1_WithCheckpoint", false, true},
                       {"R_003_2_NoSyncWithCheckpoint", true, true},
                       {"R_003_4_Bf16", false, false, bf16_compress_hook, at::kBFloat16},
                       {"R_003_5_Fp16", false, false, fp16_compress_hook, at::kHalf}};

class EagerHalf : public ::testing::TestWithParam<std::tuple<Case, DeviceCase>> {};

std::string name_of_half(const ::testing::TestParamInfo<EagerHalf::ParamType>& info) {
  return std::get<0>(info.param).name + ("_" + std::get<1>(info.param).backend);
}
INSTANTIATE_TEST_SUITE_P(Of, EagerHalf,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::ValuesIn(device_cases(at::kCPU, {"shm"},
                                                                             {2}))),
                         name_of_half);
INSTANTIATE_TEST_SUITE_P(OnCuda, EagerHalf,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::ValuesIn(cuda_backends())),
                         name_of_half);

/// What averaging must give: gradients by hand, from a model that knows of nobody.
void average_by_hand(const Net& net, const std::optional<c10::ScalarType>& dtype) {
  for (const auto& parameter : net->parameters()) {
    auto& gradient = parameter.mutable_grad();
    const auto sent = dtype ? gradient.to(*dtype).to(at::kFloat) : gradient;
    const auto mean = all_reduce(sent, ReduceOp::AVG);
    gradient = dtype ? mean.to(*dtype).to(at::kFloat) : mean;
  }
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& name,
                  double relative = 1.3e-6, double absolute = 1e-5) {
  EXPECT_TRUE(at::allclose(actual, expected, relative, absolute))
      << name << ": off by up to " << (actual - expected).abs().max().item<float>();
}

TEST_P(EagerHalf, TrainsLikeTheWrapperAndByHand) {
  const auto& [half, where] = GetParam();
  // NCCL adds halves as halves: a last bit, of which Adam makes whole steps. So gradients of the
  // first step are compared, and what follows with the wrapper alone.
  const bool is_rounded = where.backend == "nccl" && half.dtype.has_value();
  run_on(where, [which = half, is_rounded] {
    auto [replicated, wrapped] = device_twins<Net>(123, which.checkpoints);
    auto by_hand = on_device(seeded(123, [] { return Net(); }));
    replicate(replicated);
    DistributedDataParallel wrapper(wrapped);
    if (which.hook) {
      register_comm_hook(replicated, which.hook);
      wrapper.register_comm_hook(which.hook);
    }
    std::vector<std::unique_ptr<optim::Adam>> optimizers;
    for (const auto* net : {&replicated, &wrapped, &by_hand})
      optimizers.push_back(
          std::make_unique<optim::Adam>((*net)->parameters(), optim::AdamOptions{}));
    for (int step = 0; step < 2; ++step) {
      const auto x = input_of(rank(), step);
      const bool is_local = which.no_sync && step == 0;
      set_requires_gradient_sync(replicated, !is_local);
      replicated(x).sum().backward();
      wrapper(x).sum().backward();  // synchronises always; averages add up all the same
      by_hand(x).sum().backward();
      if (is_local) {
        EXPECT_TRUE(at::equal(replicated->fc1->weight.grad(), by_hand->fc1->weight.grad()));
        EXPECT_FALSE(at::equal(replicated->fc1->weight.grad(), wrapped->fc1->weight.grad()));
        continue;
      }
      const auto uncompressed = all_reduce(by_hand->fc2->weight.grad(), ReduceOp::AVG);
      average_by_hand(by_hand, which.dtype);
      EXPECT_NE(at::allclose(replicated->fc2->weight.grad(), uncompressed, 1e-5, 1e-7),
                which.dtype.has_value());
      const auto expected = by_hand->named_parameters();
      const auto others = wrapped->named_parameters();
      for (const auto& item : replicated->named_parameters()) {
        if (!is_rounded)
          expect_close(item.value().grad(), expected[item.key()].grad(), item.key());
        else if (step == 0)
          expect_close(item.value().grad(), expected[item.key()].grad(), item.key(), 1.6e-2, 1e-4);
        expect_close(item.value().grad(), others[item.key()].grad(), item.key());
      }
      for (const auto& optimizer : optimizers) {
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    const auto expected = by_hand->named_parameters();
    const auto others = wrapped->named_parameters();
    for (const auto& item : replicated->named_parameters()) {
      if (!is_rounded) expect_close(item.value(), expected[item.key()], item.key());
      expect_close(item.value(), others[item.key()], item.key());
    }
  });
}

}  // namespace
}  // namespace tessera::testing
