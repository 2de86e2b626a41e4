#pragma once

#include <torch/csrc/api/include/torch/nn/module.h>

#include <vector>

namespace tessera::recompute {

/// Leaves the running statistics of the norms in a module (BatchNorm, InstanceNorm and those that
/// name theirs alike) as it found them: a recomputation must not count its batch a second time.
class RunningStatistics {
 public:
  explicit RunningStatistics(const torch::nn::Module& module);
  ~RunningStatistics();
  RunningStatistics(const RunningStatistics&) = delete;
  RunningStatistics& operator=(const RunningStatistics&) = delete;

 private:
  struct Kept {
    at::Tensor buffer;
    at::Tensor values;
  };
  std::vector<Kept> kept_;
};

}  // namespace tessera::recompute
