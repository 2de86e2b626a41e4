#include "fully_shard/streams.h"

#include "base/devices.h"

#include <ATen/ops/empty.h>

#include <map>
#include <mutex>

namespace tessera::detail::fully_shard {
namespace {

/// One for all units: what they queue is in order.
c10::Stream stream_of(Side side, c10::Device device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<std::pair<Side, c10::DeviceIndex>, c10::Stream>();
  const std::lock_guard lock(mutex);
  const auto key = std::pair(side, device.index());
  const auto found = streams.find(key);
  if (found != streams.end()) return found->second;
  return streams.emplace(key, pool_stream(device)).first->second;
}

}  // namespace

OnSide::OnSide(Side side, c10::Device device) {
  if (device.is_cpu()) return;
  const auto stream = stream_of(side, device);
  c10::Event ready(device.type());
  ready.record(current_stream(device));
  ready.block(stream);
  guard_.emplace(stream);
}

std::optional<c10::Event> OnSide::record() const {
  if (!guard_) return std::nullopt;
  std::optional<c10::Event> event(std::in_place, guard_->current_stream().device_type());
  event->record(guard_->current_stream());
  return event;
}

void OnSide::keep(const at::Tensor& tensor) const {
  if (guard_) tensor.record_stream(guard_->current_stream());
}

void wait_for(const c10::Event& event, c10::Device device) { event.block(current_stream(device)); }

void keep_for_current_stream(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu()) tensor.record_stream(current_stream(tensor.device()));
  }
}

Delivery::Delivery(std::vector<at::Tensor> gradients, bool to_host, c10::Device device)
    : parts(std::move(gradients)) {
  if (!to_host) return;
  const OnSide side(Side::Offload, device);
  for (auto& part : parts) {
    if (!part.defined()) continue;
    side.keep(part);
    const auto options = part.options().device(at::kCPU).pinned_memory(true);
    part = at::empty(part.sizes(), options).copy_(part, /*non_blocking=*/true);
  }
  arrives = side.record();
}

}  // namespace tessera::detail::fully_shard
