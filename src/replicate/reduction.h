#pragma once

#include <tessera/replicate/state.h>

#include "base/capture.h"
#include "replicate/buckets.h"
#include "replicate/join.h"
#include "replicate/progress.h"

#include <chrono>

namespace tessera::detail::replicate {

/// How the gradients of an iteration are averaged.
class Reduction {
 public:
  virtual ~Reduction() = default;
  /// One has come that is averaged; it is in its parameter.
  virtual void on_gradient(size_t index) = 0;
  /// A backward has ended, maybe inside another one.
  virtual void end_backward() {}
  /// A backward has ended, with none around it that may bring more. Whether all gradients of the
  /// iteration have come, and are averaged.
  virtual bool finish() = 0;
};

/// In buckets that are launched, in one order on all ranks, as they fill: in shared memory where
/// gradients lie, or by works of c10d and comm hooks through flat buffers.
class BucketReduction final : public Reduction {
 public:
  /// What it is given stays where it is.
  BucketReduction(const ManagedParameters& parameters, Iteration& iteration, Progress& progress,
                  BucketsSettings settings);

  void set_hook(CommHook hook);
  const CommHook& hook() const { return hook_; }
  const Buckets& buckets() const { return buckets_; }
  int64_t iterations() const { return iterations_; }
  ReplicateStats stats() const;

  /// An iteration begins. `was_given_up`: one before it was, with gradients on their way.
  void begin(bool was_given_up);
  void on_gradient(size_t index) override;
  bool finish() override;

  /// Announces every collective from here on; empty: none.
  void announce_by(Announce announce);
  /// Takes part in what the others announced, with nothing of its own.
  void shadow(Step step, size_t bucket, int first);

 private:
  using Clock = std::chrono::steady_clock;

  void take(size_t index, bool is_missing);
  void launch_complete();
  void launch(size_t index);
  void deliver();
  void follow_order(std::vector<size_t> order, int source);
  int announce_step(Step step, size_t bucket = 0);  // the rank whose word counts

  const ManagedParameters& parameters_;
  Iteration& iteration_;
  Progress& progress_;
  Buckets buckets_;
  CommHook hook_;
  size_t next_launch_ = 0;
  Announce announce_;
  double factor_ = 1;  // of results
  int64_t iterations_ = 0;
  std::vector<double> bucket_seconds_;  // since buckets are as they are
  int64_t timed_iterations_ = 0;
  Clock::time_point began_, last_gradient_, first_launch_, done_;
};

/// By operators that a recorder sees: one collective per parameter, at the end of backward. Buckets
/// are made of the recording by the compiler, with these limits, and sent as soon as they are
/// complete. All ranks send in one order, whatever came first in their backwards.
class RecordedReduction final : public Reduction {
 public:
  RecordedReduction(const ManagedParameters& parameters, Iteration& iteration, CommHook hook,
                    BucketLimits limits);

  void on_gradient(size_t index) override;
  bool finish() override;

 private:
  void average(size_t index);

  const ManagedParameters& parameters_;
  Iteration& iteration_;
  CommHook hook_;
  BucketLimits limits_;
  std::vector<bool> has_arrived_;  // by parameter
};

/// Between programs, each of which ends where a bucket is complete: a bucket's gradients are
/// computed when the last of them is known, and travel while the next program runs.
class CutReduction final : public Reduction {
 public:
  explicit CutReduction(BucketReduction& eager) : eager_(eager) {}

  void begin() { put_off_.clear(); }
  void on_gradient(size_t index) override;
  void end_backward() override;
  bool finish() override;

 private:
  void cut();

  BucketReduction& eager_;
  std::vector<size_t> put_off_;  // came in a program that has not run yet
};

}  // namespace tessera::detail::replicate
