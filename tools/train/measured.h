#pragma once

#include "train/signals.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <optional>
#include <vector>

namespace tessera::train {

/// Seconds of a clock that only goes forward.
double now();

/// When a device has done all that this thread has issued to its current stream so far. On the CPU
/// that is when the object is made.
class DeviceEvent {
 public:
  explicit DeviceEvent(c10::Device device);

  bool has_come() const;
  void wait() const;
  /// Both have come.
  double seconds_since(const DeviceEvent& earlier) const;

 private:
  std::optional<c10::Event> event_;  // none on the CPU
  double made_at_;
};

}  // namespace tessera::train

/// What a step measures is issued with it and read a step later, so that nobody waits within one.
namespace tessera::train {

/// What asks the job to end: the signal that came first to any rank.
struct Stop {
  int signal = 0;      // 0: nothing
  int rank = 0;        // that got it
  int64_t sender = 0;  // as NotedSignal
};

/// What one rank's host tells the others of a step.
struct HostReport {
  double seconds = 0, communication = 0;  // of issuing it
  double elapsed = 0;                     // seconds of the run so far
  bool has_saved = false;
};

/// What all hosts tell.
struct HostReports {
  double communication = 0;
  double elapsed = 0;  // by the clock of rank 0
  int64_t memory = 0;
  Stop stop;
  bool have_saved = false;
};

/// What a step computes besides the update, on its device.
struct StepValues {
  at::Tensor all;        // [loss or norm, rank]
  at::Tensor found_inf;  // 1 on all ranks if the update is to be left out, else 0
};
/// Of all ranks, given the mean loss of this rank's batch and the norm of the gradient.
/// `may_overflow`: a norm that is not finite does not count. Nothing but operators, so it may be
/// part of a compiled step. Every rank calls it.
StepValues values_of_all(const at::Tensor& loss, const at::Tensor& norm, bool may_overflow);

/// What a step has computed, on its way to the host, and what hosts tell each other of it. On a GPU
/// nobody waits for either within the step.
class StepMessage {
 public:
  /// Every rank makes one.
  StepMessage(const StepValues& values, const HostReport& own, bool may_overflow);

  /// Waits until the hosts' words are there.
  HostReports told() const;

  // When the device has done the step.
  double loss() const;
  double gradient_norm() const;
  bool is_finite() const;

 private:
  bool may_overflow_;
  at::Tensor values_;                        // [loss or norm, rank], on the host
  std::vector<at::Tensor> words_;            // one tensor, [word, rank]
  c10::intrusive_ptr<c10d::Work> exchange_;  // of words_; none where they are there
};

}  // namespace tessera::train
