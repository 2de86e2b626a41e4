#pragma once

#include "train/signals.h"

#include <ATen/core/Tensor.h>

namespace tessera::train {

/// What asks the job to end: the signal that came first to any rank.
struct Stop {
  int signal = 0;      // 0: nothing
  int rank = 0;        // that got it
  int64_t sender = 0;  // as NotedSignal
};

/// What one rank has measured of a step.
struct Own {
  double loss = 0, seconds = 0, communication = 0, gradient_norm = 0;
  double elapsed = 0;  // seconds of the run so far
  bool has_saved = false;
};

/// What all ranks have.
struct Measured {
  double loss = 0, seconds = 0, communication = 0, gradient_norm = 0;
  double learning_rate = 0;
  double elapsed = 0;  // by the clock of rank 0
  int64_t memory = 0;
  Stop stop;
  bool is_finite = true;
  bool have_saved = false;
};

/// One small message per step, by which ranks decide alike. `may_overflow`: a gradient that is not
/// finite does not count. Every rank calls it.
Measured exchange(const Own& own, at::Device device, bool may_overflow);

}  // namespace tessera::train
