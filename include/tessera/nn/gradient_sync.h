#pragma once

#include <tessera/nn/module_ref.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera {
namespace nn {

/// What a composable function that averages gradients keeps with a module.
class SyncsGradients {
 public:
  virtual ~SyncsGradients() = default;
  virtual bool syncs_gradients() const = 0;
  virtual void set_syncs_gradients(bool syncs) = 0;
};

}  // namespace nn

/// Whether the next backward averages gradients over the ranks (true, the default) or only adds
/// them up on each. Applies to all replicated and fully sharded modules in `module`. Read at the
/// next forward by replicate, at the next backward by fully_shard and for plain modules.
void set_requires_gradient_sync(nn::ModuleRef module, bool requires_sync);

/// No averaging while it lives: for all but the last of the batches whose gradients add up.
class NoSync {
 public:
  explicit NoSync(nn::ModuleRef module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<nn::SyncsGradients>, bool>> before_;
};

}  // namespace tessera
