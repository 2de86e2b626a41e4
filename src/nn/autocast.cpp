#include <tessera/autocast.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

namespace tessera {

Autocast::Autocast(c10::DeviceType device, AutocastOptions options)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)),
      cache_was_enabled_(at::autocast::is_autocast_cache_enabled()) {
  const auto dtype = options.dtype.value_or(dtype_before_);
  TORCH_CHECK_VALUE(!options.enabled || dtype == at::kBFloat16 || dtype == at::kHalf,
                    "Autocast: expected the dtype kBFloat16 or kHalf, got ", dtype,
                    "; for another, cast the module and its inputs with .to()");
  if (options.enabled && device == c10::DeviceType::CUDA && !at::hasCUDA()) {
    TORCH_WARN_ONCE("Autocast: CUDA is not available, so it is disabled; for tensors on the CPU ",
                    "pass torch::kCPU");
    options.enabled = false;
  }
  at::autocast::set_autocast_enabled(device, options.enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled.value_or(cache_was_enabled_));
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // Casts of weights are kept for the outermost scope; the optimizer changes what they were made
  // of.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_was_enabled_);
}

}  // namespace tessera
