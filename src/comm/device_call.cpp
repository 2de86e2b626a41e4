#include "comm/device_call.h"

#include "base/devices.h"
#include "comm/nccl/cuda_devices.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <mutex>
#include <unordered_map>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Some times what a copy of a few KiB takes. See Note [compute engine].
constexpr std::chrono::microseconds kMoment(30);

/// As many events as calls were ever under way at once. See Note [compute engine].
class SpareEvents {
 public:
  static SpareEvents& get() {
    static auto& events = *new SpareEvents();  // outlives CUDA, which must not be asked to end them
    return events;
  }
  c10::Event take(c10::Device device) {
    const std::lock_guard lock(mutex_);
    auto& spare = by_device_[device];
    if (spare.empty()) return c10::Event(device.type());
    auto event = std::move(spare.back());
    spare.pop_back();
    return event;
  }
  void give(c10::Event event) {
    if (!event.was_marked_for_recording()) return;  // not made yet
    const std::lock_guard lock(mutex_);
    by_device_[event.device()].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::Device, std::vector<c10::Event>> by_device_;
};

/// Whether its memory on a CUDA device holds its elements in order, with nothing left to apply.
bool is_plain_cuda(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

}  // namespace

c10::Stream communication_stream(c10::Device device) {
  return pool_stream(device, /*is_high_priority=*/true);
}

c10::Stream copy_stream(c10::Device device) { return pool_stream(device); }

std::vector<c10::Device> devices_of(const std::shared_ptr<DeviceCall>& call) {
  return call ? std::vector{call->stream().device()} : std::vector<c10::Device>{};
}

DeviceCall::DeviceCall(c10::Stream stream)
    : stream_(stream),
      ready_(stream.device_type()),
      mark_(SpareEvents::get().take(stream.device())) {
  follow_caller();
}

DeviceCall::~DeviceCall() {
  for (const auto& tensor : held_) {
    try {
      if (!has_ended()) keep(tensor);
    } catch (const std::exception&) {
      // Its memory was given back already, or CUDA has ended and all memory with it.
    }
  }
  SpareEvents::get().give(std::move(mark_));
}

void DeviceCall::follow_caller() {
  const auto callers = current_stream(stream_.device());
  is_behind_ = !callers.query();
  // Over, but a wait is what tools that check the order of streams know.
  if (!is_behind_) return callers.synchronize();
  ready_.record(callers);
  ready_.block(stream_);
}

at::Tensor DeviceCall::empty_host(const at::Tensor& like) {
  return at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/true);
}

// A pending minus or conjugation is applied by the device: copies between devices of strided ones
// lose it.
at::Tensor DeviceCall::to_host(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  auto copy = empty_host(tensor);
  is_seen_ = false;
  held_.insert(held_.end(), {tensor, copy});
  if (is_plain_cuda(tensor))
    copy_to_pinned(copy, tensor, stream_);
  else
    copy.copy_(tensor.detach().resolve_conj().resolve_neg(), /*non_blocking=*/true);
  mark();  // here: later calls put more on the stream
  return copy;
}

bool DeviceCall::is_on_host() const { return held_.empty() || sees_mark_soon(); }

void DeviceCall::await_host() {
  if (held_.empty()) return;
  await_mark();
  held_.clear();
  is_behind_ = false;
}

void DeviceCall::copy_back(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  is_seen_ = false;
  held_.push_back(to);
  const bool is_alike = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes();
  if (is_plain_cuda(to) && is_alike && from.is_cpu() && from.is_contiguous())
    return held_.push_back(copy_from_host(to, from, stream_));
  const bool is_plain = !to.is_conj() && !to.is_neg();
  to.detach().copy_(is_plain ? from : from.to(to.device(), /*non_blocking=*/true),
                    /*non_blocking=*/true);
}

void DeviceCall::keep(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return;
  if (tensor.device().type() == stream_.device_type()) return tensor.record_stream(stream_);
  const auto& memory = tensor.storage().data_ptr();
  at::getHostAllocator(stream_.device_type())
      ->record_event(memory.get(), memory.get_context(), stream_);
}

void DeviceCall::end() {
  mark();
  is_ended_ = true;
}

void DeviceCall::mark() {
  is_seen_ = false;
  mark_.record(stream_);
}

bool DeviceCall::sees_mark() const {
  if (is_seen_) return true;
  if (!mark_.query()) return false;
  await_mark();  // as in follow_caller()
  return true;
}

bool DeviceCall::sees_mark_soon() const {
  const bool is_near = !held_.empty() && !is_behind_;
  const auto until = Clock::now() + (is_near ? kMoment : std::chrono::microseconds(0));
  bool is_seen = false;
  do {
    is_seen = sees_mark();
  } while (!is_seen && Clock::now() < until);
  return is_seen;
}

void DeviceCall::await_mark() const {
  if (is_seen_) return;
  mark_.synchronize();
  is_seen_ = true;
}

void DeviceCall::join() const {
  if (sees_mark_soon()) return;  // the host has seen the end: so does all that it issues
  mark_.block(current_stream(stream_.device()));
}

}  // namespace tessera::comm
