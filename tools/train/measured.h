#pragma once

#include "train/signals.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

/// What a step measures is issued with it and read a step later, so that nobody waits within one.
namespace tessera::train {

/// What asks the job to end: the signal that came first to any rank.
struct Stop {
  int signal = 0;      // 0: nothing
  int rank = 0;        // that got it
  int64_t sender = 0;  // as NotedSignal
};

/// Loss and norm of the gradient of all ranks, on the device and on their way to the host.
class StepValues {
 public:
  /// The mean loss of this rank's batch and the norm of the gradient, numbers on the device.
  /// `may_overflow`: a norm that is not finite does not count. Every rank makes one.
  StepValues(const at::Tensor& loss, const at::Tensor& norm, at::Device device, bool may_overflow);

  /// 1 on all ranks if the step is to be left out, else 0; on the device.
  const at::Tensor& found_inf() const { return found_inf_; }

  // When the device has done the step.
  double loss() const;
  double gradient_norm() const;
  bool is_finite() const;

 private:
  bool may_overflow_;
  at::Tensor found_inf_;
  at::Tensor host_;  // [loss or norm, rank], in pinned memory
};

/// What one rank's host tells the others of a step.
struct Own {
  double seconds = 0, communication = 0;  // of issuing it
  double elapsed = 0;                     // seconds of the run so far
  bool has_saved = false;
};

/// What all hosts tell.
struct Told {
  double communication = 0;
  double elapsed = 0;  // by the clock of rank 0
  int64_t memory = 0;
  Stop stop;
  bool have_saved = false;
};

/// One small message between hosts per step, by which ranks decide alike.
class HostMessage {
 public:
  /// Sends it and goes on. Every rank makes one.
  HostMessage(const Own& own, at::Device device);
  /// Waits until it is there.
  Told read() const;

 private:
  std::vector<at::Tensor> rows_;             // one tensor, [rank, column]
  c10::intrusive_ptr<c10d::Work> exchange_;  // none where a rank is alone
};

}  // namespace tessera::train
