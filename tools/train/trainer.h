#pragma once

#include "train/averages.h"
#include "train/communication.h"
#include "train/facts.h"
#include "train/journal.h"
#include "train/measured.h"
#include "train/resume.h"
#include "train/utilization.h"

#include <deque>
#include <memory>
#include <optional>
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

/// A step that was issued: the device may still be at it, its values are on their way.
struct IssuedStep {
  DeviceEvent begun, done;  // on the device
  double issued_at;         // when the host had issued all of it
  double learning_rate;
  int64_t epoch;
  int64_t place;               // of its batches in the text
  std::vector<Batch> batches;  // to find out what was not finite
  StepMessage message;
};

/// What all ranks know of a step once it is read.
struct Measured {
  double loss = 0, gradient_norm = 0, learning_rate = 0;
  double seconds = 0;  // from the end of the step before, on the device
  /// Seconds that the device went on after the host had issued the step; 0 if the device was done
  /// before the host came to read, which is a step later. None on the CPU.
  std::optional<double> host_lead = std::nullopt;
  int64_t epoch = 0;
  bool is_finite = true;
  HostReports told = {};
};

/// Trains a model as the settings, which have sizes, say; every rank has one. The host issues a
/// step before it reads what the one before it has measured, so the device never waits for it: what
/// that decides (an end, a signal, a save that is done) takes effect a step later. All that is
/// issued is read before anything is saved, validated or recorded, and at the end.
class Trainer {
 public:
  /// Throws an AgreedError if texts cannot be read or differ between ranks, if the folder cannot be
  /// used, or if it is to go on and there is no checkpoint that can be.
  Trainer(const Settings& settings, const Origin& origin, const std::string& folder, Start start);

  /// Throws an AgreedError or a RankError that ends with what is saved, and where.
  Ending run();

 private:
  void resume(Start start);
  void record_start(Start start);
  void train_steps();
  IssuedStep issue_step();
  /// Reads the oldest of the steps that were issued; waits for the device if it is still at it.
  Measured read(const IssuedStep& step);
  /// Takes notice of issued steps, the oldest first, until so many are left.
  void settle(size_t left = 0);
  void handle_nonfinite(const Measured& measured, const std::vector<Batch>& batches);
  void log(const Measured& measured);
  /// With the averages of --ema, if there are any.
  void validate(Batches::Part part);
  void save();
  void finish_saving();
  /// What a failed run leaves, as the disk has it, and under which condition it can go on.
  std::string what_is_saved(const char* condition = "") const;
  bool is_over() const;
  bool is_time_over() const;
  /// Its end is reached, or something asks for it.
  bool is_ending() const;
  Ending finish();
  Ending finish_stopped();
  void tell_communication();

  const Settings& settings_;
  const Origin& origin_;
  at::Device device_;
  Layout layout_;
  Batches batches_;
  std::shared_ptr<PowerSGDState> powersgd_;
  Model model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::ExponentialMovingAverage> average_;  // null without --ema
  TrainStep step_;
  UnitMeter units_;
  RunFolder folder_;  // outlives what writes into it
  Journal journal_;
  TrainingState training_;
  std::vector<UsedDevice> devices_;   // of all ranks; none on the CPU
  std::optional<double> peak_flops_;  // of all devices, promised or measured
  double work_per_token_;             // floating-point operations
  std::deque<IssuedStep> issued_;     // and not read, at most two
  std::optional<DeviceEvent>
      last_done_;               // of the step that was read last; none: the device was idle
  bool last_is_finite_ = true;  // of the same
  Position position_;           // of what was read
  double elapsed_before_ = 0;   // position_.elapsed of a step earlier
  double clock_start_ = 0;      // when this run would have begun had it never been stopped
  Stop stop_;                   // what ends the job before its end
  bool has_nothing_to_do_ = false;
  int64_t saved_step_ = -1;  // of the last whole checkpoint
  int64_t saving_step_ = -1;
  int skipped_in_a_row_ = 0;
  std::vector<double> recent_seconds_;   // of steps, for the time that is left
  int64_t steps_read_ = 0;               // of this start
  std::optional<double> nats_per_byte_;  // of the last validation
};

}  // namespace tessera::train
