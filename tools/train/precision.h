#pragma once

#include <ATen/autocast_mode.h>

#include <string>

namespace tessera::train {

/// Operators that gain from it compute in bf16 or fp16 while it lives; with "fp32" it does nothing.
class PrecisionScope {
 public:
  PrecisionScope(const std::string& precision, c10::DeviceType device);
  ~PrecisionScope();
  PrecisionScope(const PrecisionScope&) = delete;
  PrecisionScope& operator=(const PrecisionScope&) = delete;

 private:
  c10::DeviceType device_;
  bool was_enabled_;
  at::ScalarType dtype_before_;
  bool is_open_;
};

}  // namespace tessera::train
