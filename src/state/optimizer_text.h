#pragma once

#include <tessera/state_dict.h>

#include "state/files/file_name.h"

#include <string>
#include <vector>

namespace tessera::state {

/// Groups of an optimizer as JSON, and back, with every bit of every number.
std::string optimizer_text(const std::string& function,
                           const std::vector<OptimizerStateDict::Group>& groups);
std::vector<OptimizerStateDict::Group> parse_optimizer(const FileName& file,
                                                       const std::string& text);

}  // namespace tessera::state
