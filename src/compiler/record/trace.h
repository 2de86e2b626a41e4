#pragma once

#include <tessera/compile/graph.h>

#include "compiler/record/memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

/// An operator as it came, before it was made functional.
struct RecordedCall {
  std::string op;
  std::vector<Argument> arguments;
  /// By return of the schema, what it gave: tensors of these types, none where it is absent.
  std::vector<std::vector<std::optional<ValueType>>> results = {};
  bool gave_view = false;                                // memory of an argument
  std::optional<BucketCaps> bucket_caps = std::nullopt;  // of averages that came by then
};

/// What came when some code was recorded, for a later run of the code to be compared with.
struct Trace {
  Graph graph;
  std::vector<RecordedCall> calls;
  std::vector<ValueId> alive;  // memory held at the end

  bool is_same(const Trace& other) const;
};

/// Serves operators with fakes as long as they come as they came in a known trace.
class TraceMatcher {
 public:
  /// `stopped`: called when an operator comes that no trace has, before it runs.
  TraceMatcher(const std::vector<const Trace*>& traces, std::function<void()> stopped)
      : traces_(traces), stopped_(std::move(stopped)) {}
  void watch(const Graph& graph) { graph_ = &graph; }

  /// Replaces the arguments of `call` on the stack by results, or returns false: it must be run.
  bool serve(const c10::OperatorHandle& op, const RecordedCall& call, torch::jit::Stack& stack);
  /// Operators run from now on: what was not run is, at once.
  void stop();

  bool is_matching() const { return is_matching_; }
  /// The trace as which everything came, with nothing left; null if there is none.
  const Trace* completed(const std::vector<LiveMemory>& alive) const;

 private:
  bool matches(const Trace& trace, const RecordedCall& call) const;

  std::vector<const Trace*> traces_;  // that fit so far
  std::function<void()> stopped_;
  const Graph* graph_ = nullptr;  // what was recorded so far
  size_t next_ = 0;               // call
  size_t checked_ = 0;            // values
  bool is_matching_ = true;
};

}  // namespace tessera::compiler

/// Tensors whose values are computed later.
namespace tessera::compiler {

/// A tensor of this type without memory. Whoever asks for its address gets an error.
at::Tensor make_fake(const ValueType& type);

/// Gives memory that has none yet, or other contents, what `value` holds. Shares the value's memory
/// where it can; `value` must be nobody else's.
void give_contents(const LiveMemory& memory, const at::Tensor& value);

}  // namespace tessera::compiler
