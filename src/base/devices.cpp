#include "base/devices.h"

#include <c10/util/Exception.h>

namespace tessera {

std::optional<c10::Device> device_from_id(const char* function, const c10::IValue& id) {
  if (id.isNone()) return std::nullopt;
  TORCH_CHECK(id.isInt() || id.isDevice(), function,
              ": Expected device_id to be int or torch.device, but got ", id.tagKind(),
              "; pass one index or one c10::Device");
  return id.isDevice()
             ? id.toDevice()
             : c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(id.toInt()));
}

}  // namespace tessera
