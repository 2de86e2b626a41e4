#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <optional>

namespace tessera {

/// The device that an option of type IValue names: none, an index of a GPU, or a device. Throws in
/// the name of `function` if it is anything else.
std::optional<c10::Device> device_from_id(const char* function, const c10::IValue& id);

}  // namespace tessera
