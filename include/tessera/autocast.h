#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

struct AutocastOptions {
  std::optional<c10::ScalarType> dtype = std::nullopt;  // default: bf16 on the CPU, fp16 on CUDA
  bool enabled = true;                                  // false: off inside, whatever is outside
  std::optional<bool> cache_enabled = std::nullopt;     // weights are cast once per scope
};

/// Python's torch.autocast: while it lives, operators of this thread on `device` that gain from it
/// compute in `dtype`, and those that need it in fp32. For forward and loss; backward comes after
/// the scope, in the dtypes that forward had. Scopes nest. fp16 wants an optim::GradScaler.
/// For CUDA where there is none it warns, once, and is disabled, as Python's.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device, AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool was_enabled_;
  c10::ScalarType dtype_before_;
  bool cache_was_enabled_;
};

}  // namespace tessera
