#include "checkpoint/run_state.h"

#include "base/capture.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace tessera::detail::checkpoint {
namespace {

thread_local bool random_is_replayed = false;
thread_local int repeated_parts = 0;

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

RandomState RandomState::of(const std::vector<at::Device>& devices) {
  RandomState result;
  const auto add = [&result](const at::Device& device) {
    const auto& generator = at::globalContext().defaultGenerator(device);
    result.entries_.push_back({generator, state_of(generator)});
  };
  add(at::kCPU);
  for (const auto& device : devices) {
    if (device.is_cuda()) add(device);
  }
  return result;
}

RandomState RandomState::present() const {
  RandomState result;
  for (const auto& entry : entries_)
    result.entries_.push_back({entry.generator, state_of(entry.generator)});
  return result;
}

void RandomState::restore() const {
  for (const auto& entry : entries_) {
    auto generator = entry.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(entry.state);
  }
}

bool RandomState::operator==(const RandomState& other) const {
  return std::ranges::equal(entries_, other.entries_, [](const Entry& a, const Entry& b) {
    return a.generator == b.generator && a.state.nbytes() == b.state.nbytes() &&
           std::memcmp(a.state.const_data_ptr(), b.state.const_data_ptr(), a.state.nbytes()) == 0;
  });
}

AutocastState AutocastState::present() {
  AutocastState result;
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    result.entries_.push_back(
        {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  result.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return result;
}

void AutocastState::restore() const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
    at::autocast::set_autocast_enabled(type, entries_[i].enabled);
    at::autocast::set_autocast_dtype(type, entries_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

RunState::RunState(bool with_random, const std::vector<at::Device>& devices)
    : autocast_(AutocastState::present()) {
  if (!with_random) return;
  random_ = RandomState::of(devices);
  capture::tell([&](capture::Observer& observer) { observer.begin_random(this, /*again=*/false); });
}

void RunState::forward_ended() {
  if (!random_) return;
  capture::tell([](capture::Observer& observer) { observer.end_random(); });
  if (random_->present() == *random_) random_.reset();
}

RunState::Scope::Scope(const RunState& state) : outer_replays_random_(random_is_replayed) {
  if (const auto present = AutocastState::present(); present != state.autocast_) {
    autocast_before_ = present;
    state.autocast_.restore();
    at::autocast::increment_nesting();
  }
  if (state.random_) {
    random_before_ = state.random_->present();
    state.random_->restore();
    random_is_replayed = true;
    capture::tell(
        [&](capture::Observer& observer) { observer.begin_random(&state, /*again=*/true); });
  }
}

RunState::Scope::~Scope() {
  random_is_replayed = outer_replays_random_;
  if (random_before_) {
    random_before_->restore();
    capture::tell([](capture::Observer& observer) { observer.end_random(); });
  }
  if (autocast_before_) {
    // Casts made here belong to this run's graph.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    autocast_before_->restore();
  }
}

bool RunState::replays_random() { return random_is_replayed; }

RepeatedScope::RepeatedScope() { ++repeated_parts; }
RepeatedScope::~RepeatedScope() { --repeated_parts; }
bool RepeatedScope::is_open() { return repeated_parts > 0; }

}  // namespace tessera::detail::checkpoint
