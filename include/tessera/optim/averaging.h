#pragma once

#include <tessera/nn/module_ref.h>

#include <cstdint>
#include <memory>

namespace tessera::optim {

struct ExponentialMovingAverageOptions {
  double decay = 0.999;  // what an update leaves of the average
  /// Less than decay at first: (1 + updates) / (10 + updates).
  bool warmup = false;
  /// Averages floating-point buffers, too, and copies others; else the module's are taken.
  bool use_buffers = false;
};

/// An average of a module's weights over the steps of a training, as torch.optim.swa_utils'
/// AveragedModel with get_ema_multi_avg_fn. Of sharded and tensor parallel parameters each rank
/// averages its part: make it after fully_shard and the like. It refers to the module.
class ExponentialMovingAverage {
 public:
  explicit ExponentialMovingAverage(nn::ModuleRef module,
                                    ExponentialMovingAverageOptions options = {});
  ~ExponentialMovingAverage();
  ExponentialMovingAverage(const ExponentialMovingAverage&) = delete;
  ExponentialMovingAverage& operator=(const ExponentialMovingAverage&) = delete;

  /// After optimizer.step(), and outside of compiled functions. The first one copies. Sends
  /// nothing.
  void update();
  int64_t n_averaged() const;

  /// The averages, for save, load and state_dict: named as AveragedModel names them,
  /// "module.fc.weight" and "n_averaged", placed as the module's.
  torch::nn::Module& module();

 private:
  friend class AveragedWeights;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// While it lives, the module has the averaged weights, and the average those of the training:
/// their values are exchanged one by one, so nothing is there twice. For evaluation and export; not
/// inside of forward or backward. Every rank makes one and ends it.
class AveragedWeights {
 public:
  explicit AveragedWeights(ExponentialMovingAverage& average);
  ~AveragedWeights() noexcept(false);
  AveragedWeights(const AveragedWeights&) = delete;
  AveragedWeights& operator=(const AveragedWeights&) = delete;

 private:
  ExponentialMovingAverage& average_;
};

}  // namespace tessera::optim
