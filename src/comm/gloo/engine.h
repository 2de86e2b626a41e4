#pragma once

#include "base/signal_block.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <mutex>

namespace tessera::comm::gloo {

/// c10d's gloo as it is. Its collectives call each other by name, so they are kept apart from ours,
/// which bear the same.
class Engine final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void close_connections() {
    for (const auto& context : contexts_) context->closeConnections();
  }

  /// Calls `start` with this, one rank of the process at a time: c10d notes every collective in a
  /// table of the process, which libtorch 2.11 does not lock. To a peer that has gone, gloo writes
  /// without MSG_NOSIGNAL.
  template <class Start>
  auto start(Start start) {
    const SignalBlock block(SIGPIPE);
    const std::lock_guard lock(starting_);
    return start(*this);
  }

 private:
  inline static std::mutex starting_;
};

}  // namespace tessera::comm::gloo
