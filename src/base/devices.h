#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

/// Streams of a device without a header of CUDA.
namespace tessera {

/// The one that operators called now are queued on.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Another one of libtorch's pool at each call.
inline c10::Stream pool_stream(c10::Device device, bool is_high_priority = false) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, is_high_priority);
}

/// The device that an option of type IValue names: none, an index of a GPU, or a device. Throws in
/// the name of `function` if it is anything else.
std::optional<c10::Device> device_from_id(const char* function, const c10::IValue& id);

}  // namespace tessera
