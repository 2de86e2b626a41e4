#pragma once

#include <concepts>
#include <string>

namespace tessera {

struct ExplainOptions {
  /// Runs each kernel of the last program a few times, on tensors of its own, and adds a line for
  /// it: the bytes that it must move, the time it takes, and its share of what the device's memory
  /// moves, measured by a copy. Takes about 0.2 s for a kernel on a CPU, and memory for the tensors
  /// of one kernel and 384 MiB (on a GPU 768 MiB). The program does not run; nothing is sent.
  bool time_kernels = false;
};

/// A step or a module that was compiled.
template <class C>
concept CompiledCode = requires(const C& compiled, const ExplainOptions& options) {
  { compiled.explain(options) } -> std::same_as<std::string>;
  { compiled.generated_code() } -> std::same_as<std::string>;
  { compiled.program_graph() } -> std::same_as<std::string>;
};

/// What was captured, what was not and why, and why it was captured again.
template <CompiledCode C>
std::string explain(const C& compiled, const ExplainOptions& options = {}) {
  return compiled.explain(options);
}

/// The program of the last capture, for a reader; empty before it exists.
template <CompiledCode C>
std::string generated_code(const C& compiled) {
  return compiled.generated_code();
}

/// The graph of that program, as Graph::parse reads it; empty before it exists. Written to a file
/// it is what `tessera inspect --program` draws.
template <CompiledCode C>
std::string program_graph(const C& compiled) {
  return compiled.program_graph();
}

}  // namespace tessera
