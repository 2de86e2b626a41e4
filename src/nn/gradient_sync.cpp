#include <tessera/nn/gradient_sync.h>

#include "nn/composable.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace {

std::vector<std::shared_ptr<nn::SyncsGradients>> states_in(const torch::nn::Module& module,
                                                           const char* function) {
  auto states = nn::find_all_states<nn::SyncsGradients>(module);
  TORCH_CHECK_VALUE(!states.empty(), function,
                    ": expected a replicated or fully sharded module, or one with such parts, got ",
                    nn::name_of(module), "; call replicate or fully_shard first");
  return states;
}

}  // namespace

void set_requires_gradient_sync(nn::ModuleRef module, bool requires_sync) {
  for (const auto& state : states_in(*module, "set_requires_gradient_sync"))
    state->set_syncs_gradients(requires_sync);
}

NoSync::NoSync(nn::ModuleRef module) {
  for (const auto& state : states_in(*module, "NoSync")) {
    before_.emplace_back(state, state->syncs_gradients());
    state->set_syncs_gradients(false);
  }
}

NoSync::~NoSync() {
  for (const auto& [state, syncs] : before_) state->set_syncs_gradients(syncs);
}

}  // namespace tessera
