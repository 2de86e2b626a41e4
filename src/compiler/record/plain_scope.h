#pragma once

#include "fully_shard/face.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace tessera::compiler {

/// While it lives, distributed tensors are plain and whole, with zeros for values and without
/// gradients: enough to record what a function does with them, for which nothing is gathered.
class PlainScope {
 public:
  explicit PlainScope(const std::vector<at::Tensor>& tensors);
  ~PlainScope();
  PlainScope(const PlainScope&) = delete;
  PlainScope& operator=(const PlainScope&) = delete;

 private:
  std::vector<std::pair<sharded::TwoFaced, at::Tensor>> shown_;  // with gradients
};

/// While it lives, tensors show others in their place, to everybody who holds them: the memory,
/// sizes and dtype of these.
class ShownScope {
 public:
  /// `shown`: by tensor; empty: none is changed.
  ShownScope(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& shown);
  ~ShownScope();
  ShownScope(const ShownScope&) = delete;
  ShownScope& operator=(const ShownScope&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // with what they showed
};

}  // namespace tessera::compiler
