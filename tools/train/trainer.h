#pragma once

#include "train/facts.h"
#include "train/journal.h"
#include "train/resume.h"
#include "train/timeline.h"

#include <memory>
#include <string>
#include <vector>

namespace tessera::train {

/// What the command line was, for the files of the run.
struct Origin {
  std::string command, config_toml;
  nlohmann::json config;
};

/// Trains a GPT as the settings say; every rank has one.
class Trainer {
 public:
  /// Throws an AgreedError if texts cannot be read or differ between ranks, if the folder cannot be
  /// used, or if it is to go on and there is no checkpoint that can be.
  Trainer(const Settings& settings, const Origin& origin, const std::string& folder, Start start);

  /// The exit code: 0, or 128 + the signal that ended it.
  int run();

 private:
  /// What all ranks have measured of one step.
  struct Measured {
    double loss = 0, seconds = 0, communication = 0, gradient_norm = 0;
    int64_t memory = 0;
    int signal = 0;
    bool is_finite = true;
  };

  void introduce();
  void resume(Start start);
  void record_start(Start start);
  Measured train_step();
  Measured exchange(double loss, double seconds, double communication, double norm) const;
  void handle_nonfinite(const Measured& measured);
  void log(const Measured& measured);
  void validate();
  void save();
  void finish_saving();
  void begin_timeline(int64_t step_here);
  void end_timeline(int64_t step_here, bool is_last);
  int finish(int signal);
  int64_t sequences_per_part() const;

  const Settings& settings_;
  const Origin& origin_;
  at::Device device_;
  Layout layout_;
  Batches batches_;
  std::shared_ptr<PowerSGDState> powersgd_;
  Gpt model_;
  optim::AdamW optimizer_;
  TrainStep step_;
  RunFolder folder_;  // outlives what writes into it
  Journal journal_;
  Trainee trainee_;
  std::unique_ptr<Timeline> timeline_;
  int64_t first_traced_ = 0;  // of the steps of this start, from 0
  Position position_;
  bool has_nothing_to_do_ = false;
  int64_t saved_step_ = -1;  // of the last whole checkpoint
  int64_t saving_step_ = -1;
  int skipped_in_a_row_ = 0;
  std::vector<Batch> last_batches_;
  std::vector<double> recent_seconds_;  // of steps, for the time that is left
};

}  // namespace tessera::train
