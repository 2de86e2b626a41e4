#pragma once

#include "train/events/event_writer.h"
#include "train/progress.h"
#include "train/run_folder.h"

#include <memory>

namespace tessera::train {

/// Tells what happens: to the person who looks, to metrics.jsonl and to TensorBoard. Rank 0 has it;
/// on others it does nothing.
class Journal {
 public:
  Journal(RunFolder& folder, int64_t log_every);

  void step(const StepReport& report, const nlohmann::json& further);
  void validation(int64_t step, double loss, double seconds);
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
