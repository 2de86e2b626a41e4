#include "train/kernels.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <set>

namespace tessera::train {
namespace {

namespace profiler = torch::profiler::impl;

template <class Clock>
int64_t nanoseconds_of() {
  const auto time = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

KernelRecorder::KernelRecorder() {
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  // CUDA alone: recording operators as well would slow the host down, and name ranges of theirs
  // among the kernels.
  const std::set<profiler::ActivityType> activities = {profiler::ActivityType::CUDA};
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
}

KernelRecorder::~KernelRecorder() {
  if (is_on_) torch::autograd::profiler::disableProfiler();
}

std::vector<KernelRecord> KernelRecorder::take() {
  is_on_ = false;
  const auto result = torch::autograd::profiler::disableProfiler();
  // The profiler tells the time of day, spans that of a clock which only goes forward.
  const auto shift =
      nanoseconds_of<std::chrono::steady_clock>() - nanoseconds_of<std::chrono::system_clock>();
  std::vector<KernelRecord> records;
  for (const auto& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    const auto begin = static_cast<int64_t>(event.startNs()) + shift;
    records.push_back({.name = event.name(),
                       .device = event.deviceIndex(),
                       .stream = event.deviceResourceId(),
                       .begin = begin,
                       .end = begin + static_cast<int64_t>(event.durationNs())});
  }
  std::ranges::stable_sort(records, {}, &KernelRecord::begin);
  return records;
}

}  // namespace tessera::train
