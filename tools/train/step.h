#pragma once

#include <tessera/compile.h>
#include <tessera/optim.h>

#include "train/batches.h"
#include "train/model.h"

#include <functional>
#include <memory>
#include <string>

namespace tessera::train {

/// One step of training: gradients of a batch, then the optimizer's update, which the device leaves
/// out if the gradients are not finite. The host waits for none of it, unless it is compiled.
class TrainStep {
 public:
  TrainStep(Gpt model, optim::AdamW& optimizer, const Settings& settings, bool has_data_ranks);

  /// Forward and backward of all parts of this rank's batch. The mean loss, of this rank.
  at::Tensor backward(const std::function<Batch()>& next_part);
  /// The norm of the gradient before clipping, of all ranks.
  at::Tensor clip();
  /// Unless `found_inf`, a number on the device, is 1. Forgets the gradients either way.
  void update(const at::Tensor& found_inf);

  /// Without gradients.
  at::Tensor evaluate(const Batch& batch);

  /// As C++; empty unless compiled.
  std::string program() const;
  optim::GradScaler& scaler() { return scaler_; }

 private:
  using Part = std::function<at::Tensor(at::Tensor, at::Tensor, at::Tensor)>;
  using Update = std::function<void()>;

  at::Tensor run_part(const at::Tensor& tokens, const at::Tensor& targets, const at::Tensor& scale);

  Gpt model_;
  optim::AdamW& optimizer_;
  const Settings& settings_;
  bool is_replicated_;
  optim::GradScaler scaler_;
  Part part_;
  Update program_update_;  // of a compiled step
  std::function<std::string()> program_;
};

}  // namespace tessera::train
