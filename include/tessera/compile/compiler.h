#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// A graph made ready to run.
struct Executable {
  /// Tensors in the order of the graph's inputs, to those of its outputs. Writes the inputs that
  /// the graph writes.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run;
  /// Names what it sends to other ranks, in order: ranks run it only if all have the same.
  int64_t messages = 0;
};

/// Makes a graph ready to run. One of your own may look at the graph or change it, and hand it on
/// to codegen() or interpret().
using GraphCompiler = std::function<Executable(Graph)>;

/// Runs the passes and compiles kernels on this machine; without a compiler there it interprets.
Executable codegen(Graph graph);
/// Runs the passes; every node is an operator of ATen.
Executable interpret(Graph graph);

namespace detail {
std::vector<std::string> code_generated_by(const std::function<void()>& function);
}

/// What the function returned, and the sources that were generated meanwhile, in order.
template <class F>
auto run_and_get_code(F&& function) {
  using R = std::invoke_result_t<F&>;
  if constexpr (std::is_void_v<R>) {
    return detail::code_generated_by([&] { function(); });
  } else {
    std::optional<R> result;
    auto code = detail::code_generated_by([&] { result.emplace(function()); });
    return std::pair(std::move(*result), std::move(code));
  }
}

}  // namespace tessera
