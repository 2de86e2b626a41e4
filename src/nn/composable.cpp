#include "nn/composable.h"

#include <tessera/nn/gradient_sync.h>

#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace tessera::nn {
namespace {

/// States of modules that have no hook point. An entry ends with the module's shared_ptr; since
/// nothing tells when that happens, dead ones go at the next look at any module's states.
class PlainStates {
 public:
  ComposableStates* find(const torch::nn::Module& module) {
    const auto dead = take_dead();
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(&module);
    return found == entries_.end() ? nullptr : &found->second.states;
  }
  ComposableStates& make(const torch::nn::Module& module) {
    const auto dead = take_dead();
    const std::lock_guard lock(mutex_);
    auto& entry = entries_[&module];
    entry.module = module.weak_from_this();
    return entry.states;
  }

 private:
  struct Entry {
    std::weak_ptr<const torch::nn::Module> module;
    ComposableStates states;
  };

  /// The caller destroys them without the lock: a state's destructor may look for others.
  std::vector<Entry> take_dead() {
    const std::lock_guard lock(mutex_);
    std::vector<Entry> dead;
    std::erase_if(entries_, [&](auto& entry) {
      const bool is_dead = entry.second.module.expired();
      if (is_dead) dead.push_back(std::move(entry.second));
      return is_dead;
    });
    return dead;
  }

  std::mutex mutex_;
  std::unordered_map<const torch::nn::Module*, Entry> entries_;
};

PlainStates& plain_states() {
  static auto& states = *new PlainStates();  // modules may outlive static objects
  return states;
}

ComposableStates* find_states(const torch::nn::Module& module) {
  auto* point = find_hook_point(const_cast<torch::nn::Module&>(module));
  return point ? &point->hooks().states() : plain_states().find(module);
}

struct Names {
  std::vector<std::string> parameters;
  std::vector<std::string> buffers;
  std::vector<std::string> modules;

  explicit Names(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) parameters.push_back(item.key());
    for (const auto& item : module.named_buffers()) buffers.push_back(item.key());
    for (const auto& item : module.named_modules("", /*include_self=*/false))
      modules.push_back(item.key());
  }
};

void require_same(const char* function, const char* kind, const std::vector<std::string>& before,
                  const std::vector<std::string>& after) {
  if (before == after) return;
  const auto [old_name, new_name] =
      std::mismatch(before.begin(), before.end(), after.begin(), after.end());
  TORCH_CHECK(false, function, ": expected to leave the names of ", kind, " alone, but '",
              old_name == before.end() ? "nothing" : *old_name, "' became '",
              new_name == after.end() ? "nothing" : *new_name, "'");
}

}  // namespace

std::shared_ptr<ComposableState> ComposableStates::find(const std::string& function) const {
  for (const auto& entry : applied) {
    if (entry.function == function) return entry.state;
  }
  return nullptr;
}

std::shared_ptr<ComposableState> find_state(const torch::nn::Module& module,
                                            const std::string& function) {
  const auto* states = find_states(module);
  return states ? states->find(function) : nullptr;
}

std::vector<std::string> applied_functions(const torch::nn::Module& module) {
  std::vector<std::string> names;
  if (const auto* states = find_states(module)) {
    for (const auto& entry : states->applied) names.push_back(entry.function);
  }
  return names;
}

void check_contract(const torch::nn::Module& module, const Contract& contract) {
  const auto* existing = find_states(module);
  TORCH_CHECK_VALUE(!existing || !existing->find(contract.function), contract.function, ": ",
                    name_of(module), " already has ", contract.function,
                    " applied; a module takes it once");
  for (const auto& other : contract.excludes) {
    TORCH_CHECK_VALUE(!existing || !existing->find(other), "Cannot apply ", contract.function,
                      " to ", name_of(module), ": ", other,
                      " is applied to it; apply the two to different modules");
  }
}

void apply_composable(torch::nn::Module& module, const Contract& contract,
                      const std::function<std::shared_ptr<ComposableState>()>& apply) {
  check_contract(module, contract);
  auto* point = find_hook_point(module);
  TORCH_CHECK_VALUE(point || !module.weak_from_this().expired(), contract.function,
                    ": expected a module that a std::shared_ptr or a holder owns, got a plain "
                    "object of class ",
                    name_of(module), "; make it with std::make_shared, or use TESSERA_MODULE");
  const Names before(module);
  auto state = apply();
  const Names after(module);
  require_same(contract.function, "parameters", before.parameters, after.parameters);
  require_same(contract.function, "buffers", before.buffers, after.buffers);
  require_same(contract.function, "modules", before.modules, after.modules);
  auto& states = point ? point->hooks().states() : plain_states().make(module);
  states.applied.push_back({contract.function, std::move(state)});
}

}  // namespace tessera::nn

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
