#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

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

/// A backend whose end may have to wait for its peers.
class GracefulShutdown {
 public:
  virtual ~GracefulShutdown() = default;
  /// Announces shutdown(), so that the groups of a rank end side by side: what is queued goes on by
  /// itself, and nothing of it is waited for after `deadline`. Returns at once.
  virtual void begin_close(std::chrono::steady_clock::time_point deadline) = 0;
};

/// A backend that remembers its last collectives.
class FlightRecorder {
 public:
  virtual ~FlightRecorder() = default;
  /// One line each, with a heading that names rank and group.
  virtual std::string recent() const = 0;
};

/// A backend of ours whose collectives are threads of the host, and what the library asks of it.
class HostBackend {
 public:
  virtual ~HostBackend() = default;
  /// Returns when no collective that is complete holds its tensors any more: its threads may do so
  /// a moment longer than those who waited. Does not wait for those under way.
  virtual void await_released() = 0;
  /// Note [call check]: whether ranks compare what they call before data moves; users may turn it
  /// off.
  virtual bool compares_calls() const = 0;
  /// Whether peers read each other's tensors in host memory where they lie.
  virtual bool shares_memory() const { return false; }
};

/// Of all backends of the group.
void await_released(c10d::ProcessGroup& group);

}  // namespace tessera::comm
