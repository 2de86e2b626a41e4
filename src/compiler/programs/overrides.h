#pragma once

#include <tessera/compile/options.h>
#include <tessera/compile/pass.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera::compiler {

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
