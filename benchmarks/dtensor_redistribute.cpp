#include "dtensor_redistribute.h"

#include <tessera/comm.h>
#include <tessera/dtensor.h>

#include "statistics.h"

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(const std::function<void()>& call) {
  constexpr int kCalls = 4;
  barrier();
  const auto start = Clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kCalls;
}

}  // namespace

RedistributeTimes time_redistribute(int64_t bytes, int repeats) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(bytes) / sizeof(float)));
  const auto whole = torch::arange(side * side, torch::kFloat).view({side, side});
  const auto rows = distribute_tensor(whole, mesh, {Shard(0)}, /*src_data_rank=*/std::nullopt);
  const auto columns = rows.redistribute({Shard(1)}).to_local();
  TORCH_CHECK(columns.equal(whole.chunk(world_size(), 1)[rank()]),
              "expected redistribute to give the columns of rank ", rank());

  const auto flat = rows.to_local().flatten();
  std::vector<double> bare, redistributed;
  for (int i = 0; i <= repeats; ++i) {
    // Both in turn, so that a busy moment of the machine hits both. The first pair only warms up.
    const double one = microseconds([&] { all_to_all(flat); });
    const double other = microseconds([&] { rows.redistribute({Shard(1)}).to_local(); });
    if (i == 0) continue;
    bare.push_back(one);
    redistributed.push_back(other);
  }
  return {median(bare), median(redistributed)};
}

}  // namespace tessera::benchmarks
