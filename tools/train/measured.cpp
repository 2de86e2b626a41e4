#include "train/measured.h"

#include <tessera/comm.h>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <vector>

namespace tessera::train {
namespace {

enum Column : int64_t { Loss, Communication, Norm, Memory, Signal, When, Sender, Elapsed, Saved };

/// Of this rank: on a device what its allocator holds, otherwise the process's.
int64_t memory_in_use(at::Device device) {
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.reserved_bytes[kAll].current;
  }
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

/// Of all ranks' signals the first.
Stop stop_in(const at::Tensor& all) {
  const auto rows = all.accessor<double, 2>();
  Stop stop;
  double first = 0;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto row = rows[rank];
    if (row[Signal] == 0 || (stop.signal != 0 && row[When] >= first)) continue;
    first = row[When];
    stop = {.signal = static_cast<int>(row[Signal]),
            .rank = static_cast<int>(rank),
            .sender = static_cast<int64_t>(row[Sender])};
  }
  return stop;
}

}  // namespace

Measured exchange(const Own& own, at::Device device, bool may_overflow) {
  const auto signal = noted_signal();
  // In the order of Column.
  const std::vector<double> row = {own.loss,
                                   own.communication / own.seconds,
                                   own.gradient_norm,
                                   static_cast<double>(memory_in_use(device)),
                                   static_cast<double>(signal.number),
                                   signal.when,
                                   static_cast<double>(signal.sender),
                                   own.elapsed,
                                   own.has_saved ? 1.0 : 0.0};
  auto all =
      at::zeros({world_size(), static_cast<int64_t>(row.size())}, at::TensorOptions(at::kDouble));
  all[rank()] = at::tensor(row, at::kDouble);
  all = all_reduce(all.to(device)).to(at::kCPU);
  const auto column = [&](Column which) { return all.select(1, which); };
  const bool is_finite = std::isfinite(column(Loss).sum().item<double>()) &&
                         (may_overflow || std::isfinite(column(Norm).sum().item<double>()));
  return {.loss = column(Loss).mean().item<double>(),
          .seconds = own.seconds,
          .communication = column(Communication).mean().item<double>(),
          .gradient_norm = own.gradient_norm,
          .elapsed = column(Elapsed)[0].item<double>(),
          .memory = static_cast<int64_t>(column(Memory).max().item<double>()),
          .stop = stop_in(all),
          .is_finite = is_finite,
          .have_saved = column(Saved).min().item<double>() == 1};
}

}  // namespace tessera::train
