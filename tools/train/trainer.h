#pragma once

#include "train/facts.h"
#include "train/journal.h"
#include "train/resume.h"
#include "train/timeline.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::train {

/// What the command line was, for the files of the run.
struct Origin {
  std::string command, config_toml;
  nlohmann::json config;
};

/// An end that all ranks have agreed on: one of them tells it.
class AgreedError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Trains a GPT as the settings say; every rank has one.
class Trainer {
 public:
  /// Throws if it is to go on and the folder has no checkpoint that can be used.
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
  void resume();
  Measured train_step();
  Measured exchange(double loss, double seconds, double communication, double norm) const;
  void handle_nonfinite(const Measured& measured);
  void log(const Measured& measured);
  void validate();
  void save();
  void finish_saving();
  void begin_timeline(int64_t step_here);
  void end_timeline(int64_t step_here);
  int finish(int signal);
  int64_t sequences_per_part() const;

  const Settings& settings_;
  const Origin& origin_;
  at::Device device_;
  Layout layout_;
  Batches batches_;
  Gpt model_;
  optim::AdamW optimizer_;
  TrainStep step_;
  RunFolder folder_;  // outlives what writes into it
  Journal journal_;
  Trainee trainee_;
  std::unique_ptr<Timeline> timeline_;
  Position position_;
  int64_t saved_step_ = -1;  // of the last whole checkpoint
  int64_t saving_step_ = -1;
  int skipped_in_a_row_ = 0;
  std::vector<Batch> last_batches_;
  std::vector<double> recent_seconds_;  // of steps, for the time that is left
};

}  // namespace tessera::train
