#pragma once

#include <set>
#include <string>

namespace tessera::adopt {

/// The classes of torch::nn that tessera::nn has: "Linear". The build reads them from the public
/// headers (module_names.cmake).
const std::set<std::string, std::less<>>& module_names();

}  // namespace tessera::adopt
