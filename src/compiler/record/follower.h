#pragma once

#include "compiler/record/recorder.h"

#include <functional>

namespace tessera::compiler {

/// What came when some code was recorded, for a later run of the code to be compared with.
struct Path {
  Graph graph;
  std::vector<RecordedCall> calls;
  std::vector<ValueId> alive;  // memory held at the end

  bool is_same(const Path& other) const;
};

/// Serves operators with fakes as long as they come as they came on a known path.
class Follower final : public StandIn {
 public:
  /// `stopped`: called when an operator comes that no path knows, before it runs.
  Follower(const std::vector<const Path*>& paths, std::function<void()> stopped)
      : paths_(paths), stopped_(std::move(stopped)) {}
  void watch(const Graph& graph) { graph_ = &graph; }

  bool serve(const c10::OperatorHandle& op, const RecordedCall& call,
             torch::jit::Stack& stack) override;
  void stop() override;

  bool is_following() const { return is_following_; }
  /// The path on which everything came, with nothing left; null if there is none.
  const Path* arrived(const std::vector<LiveMemory>& alive) const;

 private:
  bool goes_on(const Path& path, const RecordedCall& call) const;

  std::vector<const Path*> paths_;  // that fit so far
  std::function<void()> stopped_;
  const Graph* graph_ = nullptr;  // what was recorded so far
  size_t next_ = 0;               // call
  size_t checked_ = 0;            // values
  bool is_following_ = true;
};

}  // namespace tessera::compiler
