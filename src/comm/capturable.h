#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>

namespace tessera::comm {

/// A backend whose calls may be captured into CUDA graphs. Who replays one says so, after it was
/// queued: nobody else knows of its calls.
class Capturable {
 public:
  virtual ~Capturable() = default;
  /// The graph on the current stream has so many calls of this backend: they are watched together,
  /// as one that is made now.
  virtual void note_replay(int64_t calls) = 0;
};

/// The group's backend for tensors on a GPU, if its calls can be captured; else null.
Capturable* find_capturable(c10d::ProcessGroup& group);

}  // namespace tessera::comm
