#include "train/measured.h"

#include <tessera/comm.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

namespace tessera::train {
namespace {

enum Value : int64_t { Loss, Norm };
enum Column : int64_t { Communication, Memory, Signal, When, Sender, Elapsed, Saved };

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

/// [loss or norm, rank] of all ranks, on the device.
at::Tensor values_of_all(const at::Tensor& loss, const at::Tensor& norm, at::Device device) {
  const auto own = at::stack({loss.to(device, at::kDouble), norm.to(device, at::kDouble)});
  if (world_size() == 1) return own.unsqueeze(1);
  auto all = at::zeros({2, world_size()}, own.options());
  all.select(1, rank()).copy_(own);
  return all_reduce(all);
}

}  // namespace

StepValues::StepValues(const at::Tensor& loss, const at::Tensor& norm, at::Device device,
                       bool may_overflow)
    : may_overflow_(may_overflow) {
  const c10::AutoGradMode no_grad(false);
  const auto all = values_of_all(loss, norm, device);
  const auto number = at::TensorOptions(at::kFloat).device(device);
  found_inf_ = at::zeros({}, number);
  // The check of a GradScaler with a scale of 1: one kernel.
  at::_amp_foreach_non_finite_check_and_unscale_({may_overflow ? all.select(0, Loss) : all},
                                                 found_inf_, at::ones({}, number));
  host_ = at::empty(all.sizes(), at::TensorOptions(at::kDouble).pinned_memory(!device.is_cpu()));
  host_.copy_(all, /*non_blocking=*/true);
}

double StepValues::loss() const { return host_.select(0, Loss).mean().item<double>(); }

double StepValues::gradient_norm() const { return host_[Norm][rank()].item<double>(); }

bool StepValues::is_finite() const {
  const auto sum = [&](Value value) { return host_.select(0, value).sum().item<double>(); };
  return std::isfinite(sum(Loss)) && (may_overflow_ || std::isfinite(sum(Norm)));
}

HostMessage::HostMessage(const Own& own, at::Device device) {
  const auto signal = noted_signal();
  // In the order of Column.
  const std::vector<double> row = {
      own.communication / own.seconds,    static_cast<double>(memory_in_use(device)),
      static_cast<double>(signal.number), signal.when,
      static_cast<double>(signal.sender), own.elapsed,
      own.has_saved ? 1.0 : 0.0};
  rows_ = {at::zeros({world_size(), static_cast<int64_t>(row.size())}, at::kDouble)};
  rows_[0].select(0, rank()).copy_(at::tensor(row, at::kDouble));
  if (world_size() > 1) exchange_ = default_group()->allreduce(rows_);
}

Told HostMessage::read() const {
  if (exchange_) exchange_->wait();
  const auto& all = rows_[0];
  const auto column = [&](Column which) { return all.select(1, which); };
  return {.communication = column(Communication).mean().item<double>(),
          .elapsed = column(Elapsed)[0].item<double>(),
          .memory = static_cast<int64_t>(column(Memory).max().item<double>()),
          .stop = stop_in(all),
          .have_saved = column(Saved).min().item<double>() == 1};
}

}  // namespace tessera::train
