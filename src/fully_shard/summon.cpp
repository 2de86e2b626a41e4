#include <tessera/fully_shard/summon.h>

#include "fully_shard/state_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace tessera {

struct SummonFullParams::Impl {
  std::vector<std::shared_ptr<sharded::State>> states;  // those that have been summoned
  bool writeback;
  int exceptions = std::uncaught_exceptions();

  void dismiss(bool writes) {
    // All show shards again, whatever becomes of one of them.
    std::exception_ptr first;
    for (const auto& state : std::exchange(states, {})) {
      try {
        state->unit().dismiss(writes);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  }
};

SummonFullParams::SummonFullParams(nn::ModuleRef module, SummonOptions options)
    : impl_(std::make_unique<Impl>()) {
  constexpr const char* kCaller = "SummonFullParams";
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.rank0_only || !options.writeback,
      "SummonFullParams: expected rank0_only without writeback, got both: what one rank writes "
      "would not reach the others' shards; set writeback = false, or write on all ranks");
  impl_->writeback = options.writeback;
  auto states = sharded::states_in(*module, kCaller);
  if (!options.recurse) {
    const auto own = sharded::state_of(*module);
    TORCH_CHECK_VALUE(own, "SummonFullParams: expected a fully sharded module, got ",
                      nn::name_of(*module), "; set recurse for the units inside it");
    states = {own};
  }
  for (const auto& state : states) state->unit().require_sharded(kCaller);
  const bool shows = !options.rank0_only ||
                     std::all_of(states.begin(), states.end(),
                                 [](auto& state) { return state->unit().is_on_first_rank(); });
  try {
    for (const auto& state : states) {
      state->unit().summon({.with_grads = options.with_grads, .shows = shows});
      impl_->states.push_back(state);
    }
  } catch (...) {
    impl_->dismiss(/*writes=*/false);
    throw;
  }
}

SummonFullParams::~SummonFullParams() noexcept(false) {
  if (std::uncaught_exceptions() == impl_->exceptions) {
    end();
    return;
  }
  try {
    impl_->dismiss(/*writes=*/false);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the exception under way says more
  }
}

void SummonFullParams::end() { impl_->dismiss(impl_->writeback); }

}  // namespace tessera
