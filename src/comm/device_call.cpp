#include "comm/device_call.h"

#include "base/device_streams.h"
#include "comm/cuda_devices.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <chrono>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Some times what a copy of a few KiB takes. See Note [compute engine].
constexpr std::chrono::microseconds kMoment(30);

}  // namespace

c10::Stream communication_stream(c10::Device device) {
  return pool_stream(device, /*is_high_priority=*/true);
}

c10::Stream copy_stream(c10::Device device) { return pool_stream(device); }

std::vector<c10::Device> devices_of(const std::shared_ptr<DeviceCall>& call) {
  return call ? std::vector{call->stream().device()} : std::vector<c10::Device>{};
}

DeviceCall::DeviceCall(c10::Stream stream)
    : stream_(stream), ready_(stream.device_type()), mark_(stream.device_type()) {
  follow_caller();
}

DeviceCall::~DeviceCall() {
  for (const auto& tensor : held_) {
    try {
      if (!has_ended()) {
        keep(tensor);
      } else {
        mark_.synchronize();  // as in follow_caller()
      }
    } catch (const std::exception&) {
      // Its memory was given back already, or CUDA has ended and all memory with it.
    }
  }
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
  return at::empty(like.sizes(), like.options().device(at::kCPU).pinned_memory(true));
}

// A pending minus or conjugation is applied by the device: copies between devices of strided ones
// lose it.
at::Tensor DeviceCall::to_host(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  held_.push_back(tensor);
  const auto plain = tensor.detach().resolve_conj().resolve_neg();
  auto copy = empty_host(tensor).copy_(plain, /*non_blocking=*/true);
  mark_.record(stream_);  // here: later calls put more on the stream
  return copy;
}

bool DeviceCall::is_on_host() const { return held_.empty() || is_marked_soon(); }

void DeviceCall::await_host() {
  if (held_.empty()) return;
  mark_.synchronize();
  held_.clear();
  is_behind_ = false;
}

void DeviceCall::copy_back(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  held_.push_back(to);
  const bool is_plain = !to.is_conj() && !to.is_neg();
  const bool is_alike = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
                        to.is_contiguous() && from.is_contiguous();
  if (is_plain && is_alike && to.is_cuda() && from.is_pinned()) {
    held_.push_back(from);
    return copy_by_engine(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), stream_);
  }
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
  mark_.record(stream_);
  is_ended_ = true;
}

bool DeviceCall::is_marked_soon() const {
  const bool is_near = !held_.empty() && !is_behind_;
  const auto until = Clock::now() + (is_near ? kMoment : std::chrono::microseconds(0));
  bool is_marked = false;
  do {
    is_marked = mark_.query();
  } while (!is_marked && Clock::now() < until);
  if (is_marked) mark_.synchronize();  // as in follow_caller()
  return is_marked;
}

void DeviceCall::join() const {
  if (is_marked_soon()) return;  // the host has seen the end: so does all that it issues
  mark_.block(current_stream(stream_.device()));
}

}  // namespace tessera::comm
