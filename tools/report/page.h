#pragma once

#include "report/run_folder.h"

#include <string>
#include <vector>

namespace tessera::report {

/// One HTML page with all that `runs` hold.
std::string make_page(const std::vector<Run>& runs);

}  // namespace tessera::report
