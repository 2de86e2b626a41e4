#include "comm/gloo/staging.h"

#include "comm/device_call.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::comm::gloo {
namespace {

c10::impl::VirtualGuardImpl streams_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

}  // namespace

Staging::Staging(c10::Device device) : device_(device), issued_(device.type()) {
  issued_.record(streams_of(device_).getStream(device_));
}

at::Tensor Staging::make_room(at::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(true));
}

at::Tensor Staging::fetch(const at::Tensor& tensor) {
  const auto copy = copy_to_host(tensor);
  c10::Event copied(tensor.device().type());
  copied.record(streams_of(tensor.device()).getStream(tensor.device()));
  copied.synchronize();
  return copy;
}

c10::Stream Staging::begin_return() const {
  const auto stream = streams_of(device_).getStreamFromGlobalPool(device_);
  issued_.block(stream);
  return stream;
}

void Staging::give_back(const at::Tensor& to, const at::Tensor& from) {
  copy_from_host(to, from);
  to.record_stream(streams_of(to.device()).getStream(to.device()));
}

}  // namespace tessera::comm::gloo
