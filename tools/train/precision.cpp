#include "train/precision.h"

namespace tessera::train {

PrecisionScope::PrecisionScope(const std::string& precision, c10::DeviceType device)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)),
      is_open_(precision != "fp32") {
  if (!is_open_) return;
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, precision == "bf16" ? at::kBFloat16 : at::kHalf);
  at::autocast::increment_nesting();
}

PrecisionScope::~PrecisionScope() {
  if (!is_open_) return;
  // Casts of parameters are kept for the scope; the optimizer changes what they were made of.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

}  // namespace tessera::train
