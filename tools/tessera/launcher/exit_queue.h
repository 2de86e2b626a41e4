#pragma once

#include "launcher/descriptor.h"

#include <vector>

namespace tessera::launcher {

/// Tells which ranks have ended, the first to end first. When one rank fails the others often fail
/// of that a moment later; the launcher may wake after both and must still name the right one.
class ExitQueue {
 public:
  ExitQueue();

  /// `pidfd` must stay open until the rank was returned by `take`.
  void add(int pidfd, int rank);

  int fd() const { return epoll_.get(); }

  /// The ranks that have ended since the last call, each once; never waits.
  std::vector<int> take();

 private:
  struct Entry {
    int pidfd;
    int rank;
  };
  Descriptor epoll_;
  std::vector<Entry> entries_;
};

}  // namespace tessera::launcher
