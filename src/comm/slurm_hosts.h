#pragma once

#include <string>

namespace tessera::comm {

/// The first host of a list in Slurm's notation: "node01" of "node[01-04,07],x". Empty for an empty
/// list.
std::string first_slurm_host(const std::string& hosts);

}  // namespace tessera::comm
