#pragma once

#include "train_sides.h"

#include <memory>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// pytorch, pytorch_malloc, reducer_gloo, …
std::vector<std::string> peer_names();

/// The other side of a comparison: the same job, trained by somebody else the way `mode` asks for.
/// Every rank calls it. Throws if the peer has nothing like that mode.
std::unique_ptr<Side> make_peer(const std::string& peer, const std::string& job,
                                const std::string& mode);

}  // namespace tessera::benchmarks
