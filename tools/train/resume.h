#pragma once

#include <tessera/serialize.h>

#include "train/run_folder.h"
#include "train/step.h"

#include <optional>

namespace tessera::train {

/// Where training is, besides tensors.
struct Position {
  int64_t step = 0;    // steps done
  int64_t tokens = 0;  // seen by all ranks
  double seconds = 0;  // of training
  int64_t skipped = 0;
};

/// What a checkpoint is made of and loaded into.
class Trainee {
 public:
  Trainee(Gpt& model, optim::AdamW& optimizer, TrainStep& step, Batches& batches,
          const Settings& settings)
      : model_(model), optimizer_(optimizer), step_(step), batches_(batches), settings_(settings) {}

  /// Starts to save in the background, once what was saved before is on disk. Every rank calls it.
  void save(const RunFolder& folder, const Position& position);
  /// Waits for what is being saved; throws what went wrong.
  void finish_saving();
  /// Throws a ValueError if the checkpoint is of another model or of other data.
  Position load(const std::string& checkpoint);

 private:
  Extra extra_of(const Position& position) const;
  void check(const std::string& checkpoint, const Extra& extra) const;

  Gpt& model_;
  optim::AdamW& optimizer_;
  TrainStep& step_;
  Batches& batches_;
  const Settings& settings_;
  std::optional<PendingSave> pending_;
};

}  // namespace tessera::train
