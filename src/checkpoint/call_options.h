#pragma once

#include <tessera/checkpoint/options.h>

namespace tessera::recompute {

/// Throws in the name of `function` where an option has no meaning.
void require_valid(const char* function, const CheckpointOptions& options);

}  // namespace tessera::recompute
