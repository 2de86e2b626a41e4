#pragma once

#include "train/communication.h"
#include "train/events/event_writer.h"
#include "train/run_folder.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// How a step went, all ranks taken together.
struct StepReport {
  int64_t step = 0, steps = 0;  // from 1
  double loss = 0, learning_rate = 0;
  double tokens_per_second = 0;  // of all ranks
  int ranks = 1;
  double communication = 0;                            // share of time, mean of the ranks
  int64_t memory = 0;                                  // bytes, of the rank that has most
  std::optional<double> utilization = std::nullopt;    // of what the devices can compute (MFU)
  std::optional<double> nats_per_byte = std::nullopt;  // of the last validation
  double seconds_left = 0;
  double done = 0;       // share of the run
  bool is_last = false;  // no step comes after it
};

/// One line that is rewritten on a terminal; plain lines, now and then, elsewhere.
class Progress {
 public:
  explicit Progress(int64_t log_every);
  void show(const StepReport& report);
  /// A line of its own that stays.
  void say(const std::string& text);
  /// The line stays as it is; what comes next stands below it.
  void settle() { line_.clear(); }

 private:
  int columns_;  // of the terminal; 0: there is none
  int64_t log_every_;
  std::string line_;  // that is there and will be rewritten
};

/// What has come of a run.
struct Result {
  std::string model;
  int64_t parameters = 0;
  double seconds = 0;
  int64_t tokens = 0;
  double tokens_per_second = 0;
  int ranks = 1;
  std::optional<double> nats_per_byte = std::nullopt;  // none: nothing to validate on
};
/// "GPT of 2.62 M parameters: 1.041 nats (1.502 bits) per byte of unseen text after 118 s, …".
std::string summary_of(const Result& result);
/// How long a training set of the size of GPT-2's would take.
std::string forecast_of(double tokens_per_second, int64_t context);

/// "12.3 MB", "1 h 02 min".
std::string format_size(int64_t bytes);
std::string format_duration(double seconds);

/// Tells what happens: to the person who looks, to metrics.jsonl and to TensorBoard. Rank 0 has it;
/// on others it does nothing.
class Journal {
 public:
  Journal(RunFolder& folder, int64_t log_every);

  void step(const StepReport& report, const nlohmann::json& further);
  /// `loss` in nats per token.
  void validation(int64_t step, double loss, std::optional<double> nats_per_byte, double seconds);
  /// The mean of the steps of this start, on rank 0: into communication.json, too.
  void communication(int64_t step, const std::vector<UnitCommunication>& units);
  /// Such as "saved", "resumed", "nonfinite"; `text` is shown if it is not empty.
  void event(const std::string& kind, int64_t step, const std::string& text);
  void say(const std::string& text);
  /// No step comes any more: what is said from here on stands below the last one's line.
  void settle() { progress_.settle(); }
  /// What is to be kept whole, e.g. program.cpp.
  void file(const std::string& name, const std::string& text);
  /// What an earlier start has left and this one may not write again.
  void remove(const std::string& name);

 private:
  EventWriter& events();

  RunFolder& folder_;
  bool is_here_;
  Progress progress_;
  std::unique_ptr<EventWriter> events_;  // from the first number on: a start may have none
};

}  // namespace tessera::train
