#pragma once

#include <tessera/compile.h>
#include <tessera/optim.h>

#include "train/batches.h"
#include "train/language_model.h"
#include "train/measured.h"
#include "train/settings.h"
#include "train/step.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// One step of training: gradients of a batch, then the optimizer's update, which the device leaves
/// out if the gradients are not finite. The host waits for none of it. Compiled, the last part of a
/// batch, clipping and the update are one program.
class TrainStep {
 public:
  TrainStep(Model model, optim::Optimizer& optimizer, const Settings& settings,
            bool has_data_ranks);

  /// All parts of this rank's batch, and the update.
  StepValues run(const std::function<Batch()>& next_part);
  /// A norm that is not finite is no failure: fp16 overflows now and then by design, and its scaler
  /// leaves such steps out.
  bool may_overflow() const { return settings_.precision == "fp16"; }

  /// Without gradients.
  at::Tensor evaluate(const Batch& batch);

  /// What a run folder keeps of the programs, by name: their text and, for `tessera inspect
  /// --program`, their graphs. None unless compiled.
  std::map<std::string, std::string> program_files() const;
  const CompileChoice& choice() const { return choice_; }
  /// A line that says why it runs eagerly although it is to be compiled, once; empty otherwise.
  std::string new_fallback();
  optim::GradScaler& scaler() { return scaler_; }

 private:
  using Part =
      std::function<at::Tensor(at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor)>;
  using Last = std::function<std::vector<at::Tensor>(at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                                     at::Tensor, at::Tensor)>;

  /// What follows the last part, given its loss and the sum of those before it, as they weigh: all
  /// ranks' values and found_inf.
  std::vector<at::Tensor> finish(const at::Tensor& loss, const at::Tensor& sum);
  /// The norm of the gradient before clipping, of all ranks.
  at::Tensor clip();
  /// Unless `found_inf`, a number on the device, is 1. Forgets the gradients either way.
  void update(const at::Tensor& found_inf);
  /// Gives the loss times `weight`; the gradient is that of the loss times `scale`.
  at::Tensor run_part(const at::Tensor& tokens, const at::Tensor& targets,
                      const at::Tensor& positions, const at::Tensor& weight,
                      const at::Tensor& scale);

  Model model_;
  optim::Optimizer& optimizer_;
  const Settings& settings_;
  bool is_replicated_;
  CompileChoice choice_;
  uint64_t asked_ = 0;  // for a fallback
  bool has_told_fallback_ = false;
  optim::GradScaler scaler_;
  Part part_;
  Last last_;
  std::function<std::map<std::string, std::string>()> program_files_;
  std::function<std::string()> explanation_;  // empty unless compiled
};

/// Which of libtorch's kernels scaled_dot_product_attention asks first on a GPU, as --attention
/// says; one that cannot compute a call passes it on to the next. auto: cuDNN's with 16 bits, where
/// it is the faster one, and libtorch's own order with fp32. Holds for the process.
void choose_attention(const Settings& settings);

/// Runs forward once more, without gradients and without a trace in random numbers or buffers: the
/// first module whose output is not finite on any rank, as "blocks.3.up on rank 1". Every rank
/// calls it. None: forward is finite everywhere.
std::optional<std::string> find_nonfinite(const LanguageModel& model, TrainStep& step,
                                          const std::vector<Batch>& batches);

}  // namespace tessera::train
