#include "compiler/programs/overrides.h"

#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

namespace tessera::compiler {
namespace {

std::vector<GraphInput> flat_state_of(const Graph& graph) {
  std::vector<GraphInput> state;
  for (const auto& input : graph.inputs) {
    if (input.kind == InputKind::Parameter || input.kind == InputKind::Buffer ||
        input.kind == InputKind::State)
      state.push_back(input);
  }
  return state;
}

}  // namespace

OverrideScope::OverrideScope(const Overrides& overrides,
                             const std::vector<torch::nn::Module*>& roots) {
  try {
    for (const auto& each : overrides) {
      for (auto* root : roots) {
        for (const auto& item : root->named_modules("", /*include_self=*/false)) {
          if (auto stand_in = each->replacement(item.key(), *item.value())) {
            auto& hooks =
                nn::require_hook_point(*item.value(), "compile (module_override)").hooks();
            before_.emplace_back(item.value(), hooks.exchange_stand_in(std::move(stand_in)));
          }
        }
      }
    }
  } catch (...) {
    undo();
    throw;
  }
}

OverrideScope::~OverrideScope() { undo(); }

void OverrideScope::undo() noexcept {
  while (!before_.empty()) {  // the last first: two may have replaced one module
    auto& [module, stand_in] = before_.back();
    nn::find_hook_point(*module)->hooks().exchange_stand_in(std::move(stand_in));
    before_.pop_back();
  }
}

std::vector<Pass> transformations(const CompileOptions& options) {
  std::vector<Pass> passes;
  if (!options.module_override.empty()) {
    passes.push_back({"module_override", [&overrides = options.module_override](Graph& graph) {
                        const auto state = flat_state_of(graph);
                        for (const auto& each : overrides) each->transform(graph, state);
                      }});
  }
  if (options.gm_transformation) passes.push_back({"gm_transformation", options.gm_transformation});
  return passes;
}

}  // namespace tessera::compiler
