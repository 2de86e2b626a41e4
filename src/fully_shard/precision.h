#pragma once

#include <tessera/fully_shard/options.h>

#include <torch/nn/module.h>

namespace tessera::detail::fully_shard {

/// The policy with every choice made that the environment may make.
MixedPrecision resolved(MixedPrecision precision);

/// Whether mixed precision leaves this module in its own dtype.
bool keeps_dtype(const torch::nn::Module& module, const MixedPrecision& precision);
/// Such a module's inputs are cast to its dtype, and its outputs back.
void cast_around(torch::nn::Module& module);

/// A buffer that mixed precision has cast.
struct CastBuffer {
  at::Tensor buffer;
  at::ScalarType own;
  at::ScalarType low;

  /// In place: members hold it.
  void cast(bool full) const;
};

}  // namespace tessera::detail::fully_shard
