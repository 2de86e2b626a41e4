#pragma once

#include <tessera/compile/compiler.h>

#include <memory>

namespace tessera {

/// While it lives, backwards that begin on this thread are captured and run as programs: autograd
/// goes through its graph at each, so that hooks run and any change is seen, but operators run
/// together at the end, with buckets of collectives and kernels of ours. Gradients are written as
/// without it. The first backward of a kind runs as it comes; later scopes know it.
///
///   CompiledBackward scope;
///   net(x).sum().backward();
///
/// Ranks that communicate in backward all have such a scope, or none. The first scope of a process
/// puts an autograd engine in front of the one that is there, which still runs all backwards. It
/// sees those that C++ begins: Python's own `loss.backward()` passes it by.
class CompiledBackward {
 public:
  /// `compiler`: codegen, interpret, or one of your own, whose programs end with the scope.
  explicit CompiledBackward(GraphCompiler compiler = codegen);
  ~CompiledBackward();
  CompiledBackward(const CompiledBackward&) = delete;
  CompiledBackward& operator=(const CompiledBackward&) = delete;

  /// What was captured, what was not and why.
  std::string explain() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
