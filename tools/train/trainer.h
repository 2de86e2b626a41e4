#pragma once

#include "train/facts.h"
#include "train/journal.h"
#include "train/measured.h"
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

/// How a job ends, on all ranks alike.
struct Ending {
  int exit_code = 0;  // 128 + the signal that ended it
  int first = -1;     // the rank that is to leave before others: a launcher names who leaves first
};

/// Trains a GPT as the settings say; every rank has one.
class Trainer {
 public:
  /// Throws an AgreedError if texts cannot be read or differ between ranks, if the folder cannot be
  /// used, or if it is to go on and there is no checkpoint that can be.
  Trainer(const Settings& settings, const Origin& origin, const std::string& folder, Start start);

  /// Throws an AgreedError or a RankError that ends with what is saved, and where.
  Ending run();

 private:
  void introduce();
  void resume(Start start);
  void record_start(Start start);
  void train_steps();
  Measured train_step();
  void handle_nonfinite(const Measured& measured);
  void log(const Measured& measured);
  void validate();
  void save();
  void finish_saving();
  /// What a failed run leaves, as the disk has it, and under which condition it can go on.
  std::string what_is_saved(const char* condition = "") const;
  bool is_over() const;
  bool is_time_over() const;
  double schedule_place() const;
  void begin_timeline(int64_t step_here);
  void end_timeline(int64_t step_here, bool is_last);
  Ending finish();
  Ending finish_stopped();
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
  double clock_start_ = 0;  // when this run would have begun had it never been stopped
  Stop stop_;               // what ends the job before its end
  bool has_nothing_to_do_ = false;
  int64_t saved_step_ = -1;  // of the last whole checkpoint
  int64_t saving_step_ = -1;
  int skipped_in_a_row_ = 0;
  std::vector<Batch> last_batches_;
  std::vector<double> recent_seconds_;  // of steps, for the time that is left
};

}  // namespace tessera::train
