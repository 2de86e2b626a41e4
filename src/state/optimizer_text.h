#pragma once

#include <tessera/state_dict.h>

#include "state/files/file_name.h"

#include <string>

namespace tessera::state {

/// An optimizer without its state as JSON, and back, with every bit of every number.
std::string optimizer_text(const std::string& function, const OptimizerStateDict& dict);
OptimizerStateDict parse_optimizer(const FileName& file, const std::string& text);

}  // namespace tessera::state
