#pragma once

#include "train_sides.h"

#include <memory>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// pytorch, pytorch_malloc, reducer_gloo, …
std::vector<std::string> peer_names(c10::DeviceType device);

/// Whether the peer has something like the mode that is worth a row: a graph of a whole step is of
/// one process that trains alone.
bool goes_with(const std::string& peer, const std::string& mode);

/// What both sides of a comparison do.
struct Arrangement {
  std::string job;
  std::string mode;
  c10::Device device;
};

/// The other side of a comparison: the same job, trained by somebody else the way the mode asks
/// for; one of Python in `processes`, one at a time. Every rank calls it. Throws if the peer has
/// nothing like that mode.
std::unique_ptr<Side> make_peer(const std::string& peer, const Arrangement& arrangement,
                                PeerJobs& processes);

}  // namespace tessera::benchmarks
