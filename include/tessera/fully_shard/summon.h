#pragma once

#include <tessera/nn/module_ref.h>

#include <memory>

namespace tessera {

struct SummonOptions {
  bool recurse = true;      // units inside the module as well
  bool writeback = true;    // what was written into the copies goes into the shards at the end
  bool rank0_only = false;  // the first rank of the mesh alone sees copies; not with writeback
  bool with_grads = false;  // gradients as well; otherwise they are out of sight
};

/// While it lives, the parameters of fully sharded units are plain whole tensors, to be read and
/// written: copies of their own, all of them at once, so each rank needs memory for the whole
/// units. Every rank makes one and ends it; each writes back its own rows, so all have to write
/// the same. Not inside of forward, backward or another such scope; forward inside of it is an
/// error. If an exception ends the scope nothing is written back. Between forward and backward
/// turn writeback off.
class SummonFullParams {
 public:
  explicit SummonFullParams(nn::ModuleRef module, SummonOptions options = {});
  /// end(), which may throw.
  ~SummonFullParams() noexcept(false);
  SummonFullParams(const SummonFullParams&) = delete;
  SummonFullParams& operator=(const SummonFullParams&) = delete;

  /// Shows shards again, before the object's own end.
  void end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
