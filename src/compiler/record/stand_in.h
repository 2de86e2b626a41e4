#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

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

/// Gives the results of operators that are not run.
class StandIn {
 public:
  virtual ~StandIn() = default;
  /// Replaces the arguments of `call` on the stack by results, or returns false: it must be run.
  virtual bool serve(const c10::OperatorHandle& op, const RecordedCall& call,
                     torch::jit::Stack& stack) = 0;
  /// Operators run from now on: what was not run must be, at once.
  virtual void stop() = 0;
};

}  // namespace tessera::compiler
