// Targets that are no classes: refused by every form of cross entropy on shards of the classes, on
// the CPU by an error of the call, on a GPU by one of the device.
#include <tessera/compile.h>
#include <tessera/nn.h>

#include "compose/on_device.h"
#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

#include <csignal>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using Loss = at::Tensor (*)(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y);

constexpr int64_t kClasses = 5, kIgnored = -7;

at::Tensor loss_of_shards(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y) {
  const loss_parallel scope;
  const auto logits =
      DTensor::from_local(x, DTensor::of(weight).mesh()).matmul(at::Tensor(weight.t()));
  return DTensor::of(at::cross_entropy_loss(logits, y, {}, at::Reduction::Mean, kIgnored))
      .to_local();
}
at::Tensor loss_of_head(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y) {
  return nn::linear_cross_entropy(x, weight, y, {.ignore_index = kIgnored});
}
at::Tensor loss_of_all(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y) {
  return loss_of_head(x, DTensor::of(weight).to_local(), y);
}

/// A GPU that has stopped is of no use to its process: ends it if all is as expected.
void expect_refused(const std::function<void()>& call) {
  if (run_device().is_cpu()) {
    EXPECT_THAT(message_of<c10::IndexError>(call), HasSubstr("out of bounds"));
    return;
  }
  EXPECT_THAT(
      message_of<c10::Error>([&] {
        call();
        c10::impl::VirtualGuardImpl(run_device().type()).synchronizeDevice(run_device().index());
      }),
      HasSubstr("device-side assert"));
  if (!::testing::Test::HasFailure()) raise(SIGKILL);
}

/// One rank holds all classes, so no other one waits for it.
void expect_wrong_targets_refused(Loss loss, bool is_compiled, int64_t wrong) {
  const auto mesh = mesh_of_all(run_device().type());
  const auto x = drawn_on_device({3, 4}, 1);
  auto weight = distribute_tensor(drawn_on_device({kClasses, 4}, 2), mesh, {Shard(0)});
  weight.requires_grad_();
  const auto targets = [](int64_t middle) {
    return at::tensor({int64_t{0}, middle, kClasses - 1}, at::kLong).to(run_device());
  };
  const auto function = [&](at::Tensor input, at::Tensor y) {
    const auto result = loss(input, weight, y);
    torch::autograd::grad({result}, {weight});
    return result.detach();
  };
  if (!is_compiled) {
    function(x, targets(kIgnored));
    expect_refused([&] { function(x, targets(wrong)); });
    return;
  }
  auto step = compile(function, {.fullgraph = true});
  for (int i = 0; i < 4; ++i) step(x, targets(kIgnored));
  EXPECT_GE(counters()["graphs"], 1);
  expect_refused([&] { step(x, targets(wrong)); });
}

class WrongTargets : public OnBackends {
 protected:
  void expect_refused_by(Loss loss) {
    for (const bool is_compiled : {false, true}) {
      for (const int64_t wrong : {kClasses, int64_t{-1}}) {
        run(1, [&] { expect_wrong_targets_refused(loss, is_compiled, wrong); },
            {.may_die = GetParam().device == at::kCUDA ? std::vector<int>{0} : std::vector<int>{}});
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Every, WrongTargets,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {1})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, WrongTargets, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

TEST_P(WrongTargets, AreRefusedByLossParallel) { expect_refused_by(loss_of_shards); }
TEST_P(WrongTargets, AreRefusedByAShardedHead) { expect_refused_by(loss_of_head); }
TEST_P(WrongTargets, AreRefusedByAHeadWithAllClasses) { expect_refused_by(loss_of_all); }

}  // namespace
}  // namespace tessera::testing
