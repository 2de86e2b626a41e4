#pragma once

#include "base/autograd.h"
#include "replicate/reduction.h"

#include <memory>
#include <mutex>

namespace tessera::detail::replicate {

/// Averages gradients while backward runs. One iteration: begin() at the end of forward, then
/// on_gradient() per parameter, in any order, until a callback at the end of backward. Iteration
/// knows what a gradient means, a Reduction averages it.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(ManagedParameters parameters, IterationSettings settings, BucketsSettings buckets);
  /// Hooks the parameters. Apart from the constructor, which has no shared_ptr yet.
  void attach();

  void set_hook(CommHook hook);
  bool has_started() const { return in_buckets_.iterations() > 0; }
  void require_sync(bool required);
  /// Throws if the last backward left parameters without gradient, or gradients came past it.
  void check_finished();
  /// Whether somebody has to tell it which backward is the outermost: expect_end_of_backward().
  bool asks_for_end_of_backward() const {
    return iteration_.settings().find_unused || iteration_.learns_uses();
  }
  /// Inside a backward: what its end means must wait for this one's, if others run inside it.
  void expect_end_of_backward();
  /// A forward has ended. `unused`: indices of parameters that its outputs do not depend on.
  /// `graph`: lives as long as theirs, of a forward in training; may be null.
  void begin(bool synchronise, const std::vector<size_t>& unused, double forward_seconds,
             const std::shared_ptr<void>& graph);

  /// Announces every collective from here on; empty: none.
  void announce_by(Announce announce);
  /// Takes part in what the others announced, with nothing of its own.
  void shadow(Step step, size_t bucket, int first);
  const ManagedParameters& parameters() const { return parameters_; }
  ReplicateStats stats() const;

 private:
  /// A recorder watches: on what the averaging depends; and why operators can't do it, or nothing.
  void note_sync(capture::Observer& observer);
  std::string why_not_recorded(const capture::Observer& observer) const;
  bool note_recording(capture::Observer& observer);
  Reduction& choose_reduction(bool begins);
  void start_iteration(const std::vector<size_t>& unused);
  void on_gradient(size_t index);
  void queue_end_of_backward();
  void end_backward(int backward);

  ManagedParameters parameters_;
  BucketLimits limits_;

  // Gradients of several devices come on several threads; a comm hook may ask for stats().
  mutable std::recursive_mutex mutex_;
  Iteration iteration_;
  Progress progress_;
  BackwardCallbacks open_backwards_;
  BucketReduction in_buckets_;
  CutReduction between_programs_;
  std::optional<RecordedReduction> by_operators_;  // in an iteration that is recorded
  double forward_seconds_ = 0;
};

}  // namespace tessera::detail::replicate
