// Small tensors of a GPU, which go through pinned memory of the host.
#include "comm/cuda_tensors.h"

namespace tessera::collective_bodies {
namespace {

using testing::DeviceCase;
using testing::expect_bitwise_equal;
using testing::run_device;
using testing::run_on;

class StagedOnCuda : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Every, StagedOnCuda,
                         ::testing::ValuesIn(testing::cuda_cases({"shm", "gloo"})),
                         testing::case_name);

TEST_P(StagedOnCuda, TensorsOfAnySizeComeThroughAndNothingBesideThem) {
  run_on(GetParam(), [] {
    constexpr int64_t kMargin = 5;
    // Around the sizes from which on other ways are taken, even and odd.
    for (const int64_t about : {4, 4 << 10, 32 << 10, 64 << 10}) {
      for (int64_t count = about - 3; count <= about + 3; ++count) {
        SCOPED_TRACE(std::to_string(count) + " bytes");
        const auto memory = at::full({count + 2 * kMargin}, 255, on(at::kByte));
        Tensors tensors{memory.narrow(0, kMargin, count)};
        tensors[0].copy_(pattern(rank(), count, at::kByte));
        default_group()->allreduce(tensors, {.reduceOp = c10d::ReduceOp::MAX})->wait();
        auto expected = pattern(0, count, at::kByte);
        for (int peer = 1; peer < world_size(); ++peer)
          expected = at::maximum(expected, pattern(peer, count, at::kByte));
        expect_bitwise_equal(tensors[0], expected, "result");
        expect_filled(memory.narrow(0, 0, kMargin), 255, "before it");
        expect_filled(memory.narrow(0, kMargin + count, kMargin), 255, "behind it");
      }
    }
  });
}

TEST_P(StagedOnCuda, StridesAndPendingOperationsAreAppliedBothWays) {
  run_on(GetParam(), [] {
    const Setting setting{.backend = "", .ranks = world_size(), .device = run_device()};
    for (const int64_t count : {1001, 3000}) {
      const auto sum_into = [&](at::Tensor view) {
        view.copy_(pattern(setting, rank(), count, view.scalar_type()));
        Tensors tensors{view};
        backend(setting)->allreduce(tensors, {})->wait();  // the group's would hand on a copy
        auto expected = at::zeros({count}, view.scalar_type());
        for (int peer = 0; peer < world_size(); ++peer)
          expected += pattern(peer, count, view.scalar_type());
        EXPECT_TRUE(view.resolve_conj().resolve_neg().cpu().equal(expected)) << view.toString();
      };
      const auto memory = at::zeros({count, 2}, on(at::kComplexFloat));
      sum_into(memory.select(1, 1));
      sum_into(memory.select(1, 1).conj());
      sum_into(at::imag(memory.select(1, 1).conj()));  // with a pending minus
      const auto plain = at::zeros({count}, on(at::kComplexFloat));
      sum_into(plain);
      sum_into(plain.conj());
      EXPECT_TRUE(memory.select(1, 0).eq(0).all().item<bool>()) << "written beside the view";
    }
  });
}

TEST_P(StagedOnCuda, WorksThatNobodyWaitsForKeepTheirMemoryUntilTheyHaveEnded) {
  if (GetParam().backend == "gloo") GTEST_SKIP() << "a call of gloo does not wait for those before";
  run_on(GetParam(), [] {
    constexpr int kCalls = 40;
    for (int turn = 0; turn < 5; ++turn) {
      std::vector<Tensors> tensors;
      for (int i = 0; i < kCalls; ++i) {
        if (i % 10 == turn) keep_busy();
        tensors.push_back({at::full({512}, rank() + i, on())});
        default_group()->allreduce(tensors.back());
      }
      Tensors last{own_number(4)};
      default_group()->allreduce(last)->wait();
      for (int i = 0; i < kCalls; ++i)
        expect_filled(tensors[i][0], sum_of_numbers() + world_size() * (i - 1),
                      "call " + std::to_string(i));
    }
  });
}

}  // namespace
}  // namespace tessera::collective_bodies
