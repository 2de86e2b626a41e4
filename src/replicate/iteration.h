#pragma once

#include <tessera/comm.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <string>
#include <vector>

namespace tessera::detail::replicate {

struct ManagedParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  std::vector<bool> is_sparse;
};

struct IterationSettings {
  std::string module_name;  // for messages
  Group group;
  bool find_unused;
  bool static_graph;
  bool has_forward;                // every forward is told of; without, every backward averages
  std::vector<at::Tensor> frozen;  // parameters beside the managed ones
};

/// What a gradient means when it comes, from the end of a forward to the end of its backward:
/// whether it is averaged, whether its parameter gets more, and which parameters get none.
class Iteration {
 public:
  Iteration(const ManagedParameters& parameters, IterationSettings settings);
  /// Of the parameter behind the last one that was added: remembers who has its slot for hooks.
  void add_hooked(const at::Tensor& parameter);

  const IterationSettings& settings() const { return settings_; }
  size_t size() const { return parameters_.tensors.size(); }
  bool requires_sync() const { return requires_sync_; }
  void require_sync(bool required) { requires_sync_ = required; }
  /// Whether ranks have to tell each other which parameters got a gradient.
  bool may_miss() const { return settings_.find_unused || settings_.static_graph; }
  /// Of a static graph, in its first iteration.
  bool learns_uses() const { return learns_uses_; }
  /// Whether a backward that ends now has gradients to average, or would have.
  bool is_averaged() const;
  /// Whether gradients have come that are averaged.
  bool has_begun() const { return phase_ == Phase::Sync && is_taking_; }
  /// Whether a gradient is averaged when it comes now; one for which no forward came is an error of
  /// check_gradient(), or begins an iteration.
  bool takes() const;
  bool begins_by_gradient() const { return phase_ == Phase::Idle && !settings_.has_forward; }

  /// A forward has ended, whose gradients are only added up.
  void begin_local();
  /// One whose gradients are averaged. `unused`: indices of parameters that its outputs do not
  /// depend on. True: gradients of one before it have come, and were given up.
  bool begin(const std::vector<size_t>& unused);
  /// By an exception; the next forward starts anew.
  void give_up() { phase_ = Phase::Idle; }
  void end();

  /// The first gradient has come: true once.
  bool begin_taking() { return !std::exchange(is_taking_, true); }
  /// What gets none, as far as it is known when the first comes.
  std::vector<size_t> known_unused() const;
  /// A gradient has come: whether it is the last of its parameter's.
  bool arrive(size_t index);
  void take(size_t index, bool is_missing);
  /// The first backward of a static graph is over: how often each parameter gets one is known.
  void settle_uses();
  int uses(size_t index) const { return uses_[index]; }
  /// Nothing has come for it yet that is expected.
  bool is_awaited(size_t index) const { return expected_[index] > 0; }
  bool is_complete() const { return taken_ == size(); }
  /// In which gradients came.
  const std::vector<size_t>& order() const { return order_; }

  void set_missing(std::vector<bool> is_missing) { is_missing_ = std::move(is_missing); }
  /// By parameter, whether any rank has a gradient for it; a collective if some may have none.
  std::vector<bool> agree_on_used() const;

  // What is refused: each throws.
  void check_gradient(size_t index) const;
  /// At the end of a backward, and before a forward: gradients that came past our hooks.
  void check_hooks() const;
  /// Before a forward: parameters that the last backward left without gradient.
  void check_finished();

 private:
  enum class Phase {
    Idle,   // no forward since the last average: an error
    Local,  // it is only added up
    Sync,   // it is averaged
  };
  bool was_seen(size_t index) const;
  void check_trained(size_t index) const;
  std::vector<std::string> missing_names() const;

  const ManagedParameters& parameters_;
  IterationSettings settings_;
  std::atomic<bool> requires_sync_ = true;
  Phase phase_ = Phase::Idle;
  bool has_local_ = false;      // since the last average gradients may have been added up
  bool is_taking_ = false;      // a gradient has come
  bool learns_uses_;            // in the first of a static graph
  std::vector<int> expected_;   // gradients still to come, by parameter
  std::vector<int> uses_;       // of a static graph, as the first iteration showed
  std::vector<size_t> unused_;  // by the search
  std::vector<bool> is_missing_;
  std::vector<size_t> order_;
  size_t taken_ = 0;
  std::vector<const void*> slots_;  // by parameter: who had libtorch's one slot when we were hooked
};

}  // namespace tessera::detail::replicate
