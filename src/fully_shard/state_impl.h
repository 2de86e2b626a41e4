#pragma once

#include <tessera/fully_shard.h>

#include "fully_shard/precision.h"
#include "fully_shard/tree.h"
#include "nn/composable.h"

namespace tessera::detail::fully_shard {

inline constexpr const char* kName = "fully_shard";

/// What the calls of one module, or of several that make up one unit, mean for the unit.
class State final : public nn::ComposableState,
                    public nn::SyncsGradients,
                    public FullyShardState,
                    public std::enable_shared_from_this<State> {
 public:
  State(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options,
        std::shared_ptr<Unit> unit, std::vector<CastBuffer> buffers);
  ~State() override;
  /// Hooks the modules. Apart from the constructor, which has no shared_ptr yet.
  void attach();

  std::vector<std::string> param_names() const override { return unit_->names(); }
  bool is_root() const override { return is_root_; }
  bool is_unsharded() const override { return unit_->is_unsharded(); }
  bool requires_gradient_sync() const override { return unit_->requires_sync(); }
  bool syncs_gradients() const override { return unit_->requires_sync(); }
  void set_syncs_gradients(bool syncs) override { unit_->set_requires_sync(syncs); }
  ShardingStrategy strategy() const override { return strategy_; }
  FullyShardStats stats() const override { return unit_->stats(); }

  Unit& unit() { return *unit_; }
  const std::string& name() const { return name_; }
  /// "'blocks.0' (Block)": with its path in the tree.
  std::string describe() const;
  void unshard();
  void reshard();
  /// Begins to gather for a use that comes soon.
  void gather_ahead(Use use);

  std::optional<ReshardAfterForward> reshard_after_forward;
  bool reshard_after_backward = true;
  StateDictSettings state_dict_settings;
  std::vector<std::weak_ptr<State>> forward_prefetch;
  std::vector<std::weak_ptr<State>> backward_prefetch;

  /// The end of the outermost forward, if the unit is still in its own: some of its modules were
  /// not called.
  void end_forward();
  /// The end of a backward, if the unit is still in it: some parameters got no gradient.
  void finish_backward();
  /// The end of a backward in which the unit had no part: reduces what earlier batches left.
  void reduce_earlier();
  /// Undoes what an exception left.
  void recover();
  /// The same for a backward alone, which left other units in forward. Whether gradients of earlier
  /// batches were dropped.
  bool recover_backward();

 private:
  enum class Phase {
    Idle,
    Forward,   // between the two forward hooks
    Backward,  // from the first gradient of an output to the last of a parameter
  };

  void before_forward(nn::Arguments& arguments);
  void after_forward(const torch::nn::Module& module, const nn::Result& result);
  void before_backward();
  void begin_unexpected_backward();
  void begin_gradients();
  void reduce(bool was_whole);
  void leave_forward();
  void after_inputs(const std::vector<at::Tensor>& grad_inputs);
  void complete();
  void become_root();
  void hook_inputs();
  void cast_inputs(nn::Arguments& arguments) const;
  void cast_outputs(const nn::Result& result) const;
  bool watch_outputs(const nn::Result& result);
  Keep kept_after_forward(bool expects_backward) const;
  bool computes_in_full(Use use) const;
  void choose_precision(Use use);
  void prefetch(Use use);

  std::vector<torch::nn::Module*> modules_;
  std::string name_;
  MixedPrecision precision_;
  ShardingStrategy strategy_;
  std::optional<bool> prefetches_forward_;
  std::shared_ptr<Unit> unit_;
  std::vector<CastBuffer> buffers_;
  std::shared_ptr<Tree> tree_;  // null before the first forward
  std::string path_;
  bool is_root_ = false;
  bool waits_for_inputs_ = false;  // is told of their gradients, for frozen parameters
  Phase phase_ = Phase::Idle;
  std::vector<const torch::nn::Module*> to_run_;  // modules that this forward has yet to leave
  bool expects_backward_ = false;                 // one that it has left does
  bool has_unexpected_ = false;  // gradients came, or may come, that no forward led to
  size_t modules_through_ = 0;   // whose inputs have their gradients
  int completed_in_ = -1;        // backward
  bool was_in_full_ = false;     // the last forward that expected a backward
};

std::shared_ptr<State> state_of(const torch::nn::Module& module);
/// Those of the module and its parts, each once. Throws if there are none.
std::vector<std::shared_ptr<State>> states_in(const torch::nn::Module& module,
                                              const char* function);

}  // namespace tessera::detail::fully_shard
