#include "comm/device_call.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::comm {

c10::Stream communication_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

// A pending minus or conjugation is applied by the device: copies between devices of strided ones
// lose it.
at::Tensor copy_to_host(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const auto plain = tensor.detach().resolve_conj().resolve_neg();
  return DeviceCall::empty_host(tensor).copy_(plain, /*non_blocking=*/true);
}

void copy_from_host(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  const bool is_plain = !to.is_conj() && !to.is_neg();
  to.detach().copy_(is_plain ? from : from.to(to.device(), /*non_blocking=*/true),
                    /*non_blocking=*/true);
}

std::vector<c10::Device> devices_of(const std::shared_ptr<DeviceCall>& call) {
  return call ? std::vector{call->stream().device()} : std::vector<c10::Device>{};
}

DeviceCall::DeviceCall(c10::Stream stream)
    : stream_(stream), ready_(stream.device_type()), ended_(stream.device_type()) {
  const auto callers = c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
  ready_.record(callers);
  ready_.block(stream_);
}

at::Tensor DeviceCall::empty_host(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU).pinned_memory(true));
}

at::Tensor DeviceCall::to_host(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  keep(tensor);
  return copy_to_host(tensor);
}

void DeviceCall::await_host() {
  c10::Event copied(stream_.device_type());
  copied.record(stream_);
  copied.synchronize();
}

void DeviceCall::keep(const at::Tensor& tensor) {
  if (tensor.device().type() == stream_.device_type() && tensor.has_storage())
    tensor.record_stream(stream_);
}

void DeviceCall::end() { ended_.record(stream_); }

void DeviceCall::join() const {
  ended_.block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
}

}  // namespace tessera::comm
