#pragma once

#include <tessera/compile/compiler.h>
#include <tessera/compile/options.h>
#include <tessera/compile/pass.h>

#include "compiler/kernels/kernels.h"
#include "compiler/passes/recompute.h"

#include <memory>
#include <utility>
#include <vector>

namespace tessera::compiler {

/// Runs the passes: ours, `further`, the user's, and those that need to come last.
MemoryReport optimise(Graph& graph, const CompileOptions& options,
                      const std::vector<Pass>& further = {});

/// The options of a forward or backward that is compiled by itself: Note [random numbers].
CompileOptions of_part(CompileOptions options);

/// Those of the passes that join, merge or move messages, by name.
std::vector<std::string> passes_over_messages(const CompileOptions& options,
                                              const std::vector<Pass>& further);

/// Throws a ValueError unless the options can be had and passes are in an order they allow.
void check_options(const CompileOptions& options);

/// A graph as it is run.
struct Prepared {
  Graph graph;
  std::vector<Launch> kernels = {};  // by node; none: all nodes are operators
  std::string why_interpreted = {};  // if kernels were asked for and there are none
  std::string memory = {};           // its planned peak, for explain()
  std::string over_budget = {};      // why that is above CompileOptions::memory_budget, if it is
};
/// Optimises it, compiles its kernels and counts both.
Prepared prepare(Graph graph, const CompileOptions& options, const std::vector<Pass>& further = {});
Executable make_executable(Prepared prepared);

using Overrides = std::vector<std::shared_ptr<Override>>;

/// While it lives, replacements run in place of modules below these.
class OverrideScope {
 public:
  OverrideScope(const Overrides& overrides, const std::vector<torch::nn::Module*>& roots);
  ~OverrideScope();
  OverrideScope(const OverrideScope&) = delete;
  OverrideScope& operator=(const OverrideScope&) = delete;

 private:
  void undo() noexcept;

  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, nn::ForwardStandIn>> before_;
};

/// What the user's hands do to a captured graph: `module_override`'s transform, gm_transformation.
std::vector<Pass> transformations(const CompileOptions& options);

}  // namespace tessera::compiler
