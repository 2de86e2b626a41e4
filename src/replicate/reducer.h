#pragma once

#include <tessera/replicate/state.h>

#include "base/capture.h"
#include "base/open_backwards.h"
#include "replicate/bucket.h"
#include "replicate/bucket_assignment.h"
#include "replicate/progress.h"
#include "replicate/roll_call.h"

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>

namespace tessera::replication {

struct ManagedParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  std::vector<bool> is_sparse;
};

struct ReducerSettings {
  std::string module_name;  // for messages
  Group group;
  BucketLimits limits;
  bool find_unused;
  bool views;
  bool static_graph;
  bool in_background;
  bool has_forward;  // begin() tells of every forward; without, every backward averages
  std::vector<at::Tensor> frozen;  // parameters beside the managed ones
  std::vector<size_t> together;    // one bucket, sent when the last of them has come
};

/// Averages gradients while backward runs. One iteration: begin() at the end of forward, then
/// on_gradient() per parameter, in any order; buckets are launched in one order on all ranks as
/// they fill; a callback at the end of backward waits for the results and delivers them.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(ManagedParameters parameters, ReducerSettings settings);
  /// Hooks the parameters. Apart from the constructor, which has no shared_ptr yet.
  void attach();

  void set_hook(CommHook hook);
  bool has_started() const { return iterations_ > 0; }
  void require_sync(bool required);
  /// Throws if the last backward left parameters without gradient, or gradients came past it.
  void check_finished();
  /// Whether somebody has to tell it which backward is the outermost: expect_end_of_backward().
  bool asks_for_end_of_backward() const { return settings_.find_unused || learns_uses_; }
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
  using Clock = std::chrono::steady_clock;
  /// What a gradient means when it comes.
  enum class Phase {
    Idle,   // no forward since the last average: an error
    Local,  // it is only added up
    Sync,   // it is averaged
  };

  /// A recorder watches: on what the averaging depends, and the averaging itself.
  void note_sync(capture::Observer& observer);
  void note_recording(capture::Observer& observer);
  std::string why_not_recorded(const capture::Observer& observer) const;
  bool goes_by_operators() const;
  void take_recorded(size_t index);
  void put_off(size_t index, capture::Observer& observer);
  void take_put_off(capture::Observer& observer);
  std::vector<bool> agree_on_recorded();
  void average_recorded(size_t index);
  void end_recorded();
  void make_buckets(const Assignment& assignment);
  void start_iteration(const std::vector<size_t>& unused);
  void take_unused();
  void take_rest();
  void on_gradient(size_t index);
  void check_trained(size_t index) const;
  void check_gradient(size_t index) const;
  void take(size_t index, bool is_missing);
  void launch_complete();
  void launch(size_t index);
  bool is_last(size_t bucket) const;
  void queue_end_of_backward();
  void end_backward(int backward);
  bool was_seen(size_t index) const;
  void check_hooks() const;
  static const void* slot_of(const at::Tensor& parameter);
  int call_roll(Step step, size_t bucket = 0);  // the rank whose word counts
  void settle_static_graph();
  bool may_miss_gradients() const { return settings_.find_unused || settings_.static_graph; }
  std::vector<bool> agree_on_used();
  void finish_iteration();
  void rebuild_buckets(int source);
  std::vector<std::string> missing_names() const;

  ManagedParameters parameters_;
  ReducerSettings settings_;
  CommHook hook_;
  std::atomic<bool> requires_sync_ = true;

  // Gradients of several devices come on several threads; a comm hook may ask for stats().
  mutable std::recursive_mutex mutex_;
  Phase phase_ = Phase::Idle;
  std::vector<Bucket> buckets_;
  struct Place {
    size_t bucket;
    size_t position;
  };
  std::vector<Place> places_;   // by parameter
  std::vector<int> expected_;   // gradients still to come in this iteration
  std::vector<int> uses_;       // of a static graph, as the first iteration showed
  std::vector<size_t> unused_;  // in this iteration, by the search
  std::vector<bool> is_missing_;
  std::vector<size_t> order_;  // in which gradients came
  size_t next_launch_ = 0;
  size_t taken_ = 0;
  bool is_taking_ = false;         // a gradient has come in this iteration
  std::vector<bool> has_arrived_;  // by parameter, in a recorded backward
  std::vector<size_t> put_off_;    // came in a program that has not run yet
  bool is_recorded_ = false;       // and was averaged by operators, not in buckets
  OpenBackwards open_backwards_;
  std::vector<const void*> slots_;  // by parameter: who had libtorch's one slot when we were hooked
  bool rebuilt_ = false, learns_uses_ = false;  // the latter in the first of a static graph
  Progress progress_;
  Announce announce_;
  double factor_ = 1;  // of results
  int64_t iterations_ = 0;
  double forward_seconds_ = 0;
  Clock::time_point began_, last_gradient_, first_launch_, done_;
};

}  // namespace tessera::replication
