#include "train/measured.h"

#include <tessera/comm.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>

namespace tessera::train {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

DeviceEvent::DeviceEvent(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl devices(device.type());
    event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // one that tells the time
    event_->record(devices.getStream(device));
  }
  made_at_ = now();
}

bool DeviceEvent::has_come() const { return !event_ || event_->query(); }

void DeviceEvent::wait() const {
  if (event_) event_->synchronize();
}

double DeviceEvent::seconds_since(const DeviceEvent& earlier) const {
  constexpr double kMilliseconds = 1e3;
  return event_ ? earlier.event_->elapsedTime(*event_) / kMilliseconds
                : made_at_ - earlier.made_at_;
}

namespace {

enum Value : int64_t { Loss, Norm };
enum Word : int64_t { Communication, Memory, Signal, When, Sender, Elapsed, Saved };

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

/// What this host has to tell, in the order of Word.
at::Tensor words_of(const HostReport& own, at::Device device) {
  const auto signal = noted_signal();
  return at::tensor({own.communication / own.seconds, static_cast<double>(memory_in_use(device)),
                     static_cast<double>(signal.number), signal.when,
                     static_cast<double>(signal.sender), own.elapsed, own.has_saved ? 1.0 : 0.0},
                    at::kDouble);
}

/// [number, rank], with this rank's in its column: their sum over all ranks has everybody's.
at::Tensor beside_zeros(const at::Tensor& own) {
  if (world_size() == 1) return own.unsqueeze(1);
  auto all = at::zeros({own.size(0), world_size()}, own.options());
  all.select(1, rank()).copy_(own);
  return all;
}

at::Tensor of_all(const at::Tensor& own) {
  return world_size() == 1 ? beside_zeros(own) : all_reduce(beside_zeros(own));
}

/// Of all ranks' signals the first.
Stop stop_in(const at::Tensor& words) {
  const auto all = words.accessor<double, 2>();
  Stop stop;
  double first = 0;
  for (int64_t rank = 0; rank < words.size(1); ++rank) {
    if (all[Signal][rank] == 0 || (stop.signal != 0 && all[When][rank] >= first)) continue;
    first = all[When][rank];
    stop = {.signal = static_cast<int>(all[Signal][rank]),
            .rank = static_cast<int>(rank),
            .sender = static_cast<int64_t>(all[Sender][rank])};
  }
  return stop;
}

}  // namespace

StepValues values_of_all(const at::Tensor& loss, const at::Tensor& norm, bool may_overflow) {
  const c10::AutoGradMode no_grad(false);
  const auto device = loss.device();
  StepValues values;
  values.all = of_all(at::stack({loss.to(at::kDouble), norm.to(device, at::kDouble)}));
  const auto number = at::TensorOptions(at::kFloat).device(device);
  values.found_inf = at::zeros({}, number);
  // The check of a GradScaler with a scale of 1: one kernel. It writes what it checks.
  const auto checked = (may_overflow ? values.all.select(0, Loss) : values.all).clone();
  at::_amp_foreach_non_finite_check_and_unscale_({checked}, values.found_inf, at::ones({}, number));
  return values;
}

StepMessage::StepMessage(const StepValues& values, const HostReport& own, bool may_overflow)
    : may_overflow_(may_overflow), values_(values.all) {
  const c10::AutoGradMode no_grad(false);
  const auto device = values_.device();
  words_ = {beside_zeros(words_of(own, device))};
  if (world_size() > 1) exchange_ = default_group()->allreduce(words_);
  if (device.is_cpu()) return;
  values_ = at::empty(values.all.sizes(), at::TensorOptions(at::kDouble).pinned_memory(true));
  values_.copy_(values.all, /*non_blocking=*/true);
}

HostReports StepMessage::told() const {
  if (exchange_) exchange_->wait();
  const auto word = [&](Word which) { return words_[0].select(0, which); };
  return {.communication = word(Communication).mean().item<double>(),
          .elapsed = word(Elapsed)[0].item<double>(),
          .memory = static_cast<int64_t>(word(Memory).max().item<double>()),
          .stop = stop_in(words_[0]),
          .have_saved = word(Saved).min().item<double>() == 1};
}

double StepMessage::loss() const { return values_.select(0, Loss).mean().item<double>(); }

double StepMessage::gradient_norm() const { return values_[Norm][rank()].item<double>(); }

bool StepMessage::is_finite() const {
  const auto sum = [&](Value value) { return values_.select(0, value).sum().item<double>(); };
  return std::isfinite(sum(Loss)) && (may_overflow_ || std::isfinite(sum(Norm)));
}

}  // namespace tessera::train
