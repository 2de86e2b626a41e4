#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>

namespace tessera::comm {

/// A CUDA graph with calls of a backend in it.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  /// Drops the graph: the backend closes, and would wait for it.
  virtual void release() = 0;
};

/// A backend whose calls may be captured into CUDA graphs. Nobody but who captures and replays
/// knows of these calls, and says so.
class Capturable {
 public:
  virtual ~Capturable() = default;
  /// `graph` was captured, with so many calls of this backend.
  virtual void note_capture(std::weak_ptr<CapturedGraph> graph, int64_t calls) = 0;
  /// A graph with so many calls was queued on the current stream: they are watched together, as a
  /// call that is made now.
  virtual void note_replay(int64_t calls) = 0;
};

/// The group's backend for tensors on a GPU, if its calls can be captured; else null.
Capturable* find_capturable(c10d::ProcessGroup& group);

}  // namespace tessera::comm
