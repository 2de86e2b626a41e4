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

}  // namespace tessera::compiler
