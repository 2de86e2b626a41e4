#pragma once

#include <tessera/comm.h>
#include <tessera/nn/module_ref.h>

#include <memory>
#include <vector>

namespace tessera {

namespace detail::replicate {
class JoinedEngines;
}

struct JoinOptions {
  /// Gradients are divided by the number of ranks; false: of those that still have batches.
  bool divide_by_initial_world_size = true;
  /// Once a rank has run out all ranks throw: the others in their next forward or backward, that
  /// rank in finish().
  bool throw_on_early_termination = false;
};

/// Training in which ranks have different numbers of batches, none included: a rank that has run
/// out takes part in what the others send, with gradients of zero, until all have run out.
///   {
///     tessera::Join join(net);
///     while (auto batch = next_batch()) train(net, *batch);
///   }  // here a rank waits for, and shadows, those that go on
/// Inside, ranks with batches left do the same things in the same order, and nothing collective but
/// the modules' own: a rank that has run out would not take part in an all_reduce of yours.
/// Afterwards all have the parameters and buffers of the highest rank that ran longest; an
/// optimizer's state is not brought along. Buffers that follow a rank follow the lowest one with
/// batches left. A comm hook's result counts as an average over all ranks.
class Join {
 public:
  /// `module` or parts of it are replicated. A collective, like the first forward of these.
  template <nn::ModuleLike M>
  explicit Join(M&& module, JoinOptions options = {})
      : Join(std::vector<nn::ModuleRef>{nn::ModuleRef(module)}, options) {}
  /// Several modules, over the same ranks: Join join({generator, critic});
  explicit Join(const std::vector<nn::ModuleRef>& modules, JoinOptions options = {});
  /// Calls finish(), so it may throw; during an exception it tells the other ranks, which throw in
  /// turn, and waits for nobody.
  ~Join() noexcept(false);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// This rank has run out. Returns when all have, with the same model everywhere. Nothing inside
  /// the scope is trained after it.
  void finish();

 private:
  std::unique_ptr<detail::replicate::JoinedEngines> engines_;
  int exceptions_;  // in flight when it was made
};

}  // namespace tessera
