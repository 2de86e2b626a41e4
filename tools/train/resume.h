#pragma once

#include <tessera/serialize.h>

#include "train/run_folder.h"
#include "train/step.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// Where the trainer's own state is in a checkpoint: JSON, the same on all ranks.
inline constexpr const char* kTrainerState = "trainer";

/// Where training is, besides tensors.
struct Position {
  int64_t step = 0;    // steps done
  int64_t tokens = 0;  // seen by all ranks
  double seconds = 0;  // of steps
  double elapsed = 0;  // of the run by rank 0's clock: validations and saves, too
  int64_t skipped = 0;
};

/// What a checkpoint is made of and loaded into.
class TrainingState {
 public:
  /// `saved`: the model's modules with what else has its place in a checkpoint.
  TrainingState(LanguageModel& model, std::shared_ptr<torch::nn::Module> saved,
                optim::Optimizer& optimizer, TrainStep& step, Batches& batches,
                const Layout& layout, const Settings& settings,
                std::shared_ptr<PowerSGDState> powersgd)
      : model_(model),
        saved_(std::move(saved)),
        optimizer_(optimizer),
        step_(step),
        batches_(batches),
        layout_(layout),
        settings_(settings),
        powersgd_(std::move(powersgd)) {}

  /// Starts to save in the background, once what was saved before is on disk. Every rank calls it.
  void save(const RunFolder& folder, const Position& position);
  /// Whether what is being saved is on disk.
  bool has_saved() const { return pending_ && pending_->is_done(); }
  /// Waits for it; throws what went wrong.
  void finish_saving();
  /// The checkpoints of the run, the newest first.
  static std::vector<std::string> checkpoints(const RunFolder& folder);
  /// Every rank calls it. Throws an AgreedError if the checkpoint is of another model or of other
  /// data, before a tensor is read; a ValueError, on all ranks, if it is damaged.
  Position load(const std::string& checkpoint);

 private:
  Extra extra_of(const Position& position) const;
  /// The state in what a checkpoint holds beside tensors, if it is this model's.
  nlohmann::json checked_state(const std::string& checkpoint, const Extra& extra) const;
  void load_random_state(const Extra& extra) const;
  void draw_anew(uint64_t step) const;

  LanguageModel& model_;
  std::shared_ptr<torch::nn::Module> saved_;
  optim::Optimizer& optimizer_;
  TrainStep& step_;
  Batches& batches_;
  const Layout& layout_;
  const Settings& settings_;
  std::shared_ptr<PowerSGDState> powersgd_;
  std::optional<PendingSave> pending_;
};

}  // namespace tessera::train
