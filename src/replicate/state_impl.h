#pragma once

#include <tessera/replicate.h>

#include "nn/composable.h"
#include "replicate/init.h"
#include "replicate/precision.h"
#include "replicate/reducer.h"

namespace tessera::detail::replicate {

/// How calls of a replicated module are seen.
enum class Boundary {
  Hooks,    // hooks of a hookable module
  Wrapper,  // DistributedDataParallel calls before and after
  None,     // a plain module: not at all
};

class Engine final : public ReplicateEngine {
 public:
  explicit Engine(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  ReplicateStats stats() const override { return reducer_->stats(); }
  Reducer& reducer() { return *reducer_; }
  void replace(std::shared_ptr<Reducer> reducer) { reducer_ = std::move(reducer); }

 private:
  std::shared_ptr<Reducer> reducer_;
};

class State final : public nn::ComposableState,
                    public nn::SyncsGradients,
                    public ReplicateState,
                    public std::enable_shared_from_this<State> {
 public:
  /// Checks what can be checked without the other ranks.
  State(torch::nn::Module& module, ReplicateOptions options, Boundary boundary);
  ~State() override;

  std::vector<std::string> param_names() const override;
  ReplicateEngineHandle engine() const override { return {engine_.get(), module_name()}; }
  bool requires_gradient_sync() const override { return requires_sync_; }

  /// Until the engine exists, a gradient is an error: the module is not called, only its parts.
  void watch_gradients();
  /// Joins the other ranks; a collective.
  void build();
  bool syncs_gradients() const override { return requires_sync_; }
  void set_syncs_gradients(bool syncs) override;
  /// Whether the outputs of a forward tell which parameters get no gradient.
  bool searches_unused() const { return options_.find_unused_parameters && !options_.static_graph; }
  bool lowers_precision() const { return options_.mixed_precision.has_value(); }
  /// The backward that comes next, of these outputs, is averaged, and gradients stay so until they
  /// are not: for several forwards before their backwards.
  void begin_backward(const std::vector<at::Tensor>& outputs);
  void set_hook(CommHook hook);
  const Group& group() const { return group_; }  // once it is built
  std::string module_name() const { return nn::name_of(module_); }

  // Inside a Join.
  void require_unjoined() const;
  void ensure_built();
  /// For roll calls alone; a collective when first asked for.
  const Group& join_group();
  void join(Announce announce, bool announces_forward);
  void end_join() noexcept;
  void check_finished() { engine_->reducer().check_finished(); }
  /// Takes part in what the others announced, with nothing of its own.
  void shadow(Step step, size_t bucket, int first);
  /// Parameters and buffers of this group rank; a collective.
  void take_values_of(int source);

  void before_forward(c10::function_ref<void(nn::TensorVisitor)> for_each_input);
  void after_forward(c10::function_ref<void(nn::TensorVisitor)> for_each_output);

 private:
  void refuse_gradient(const at::Tensor& parameter) const;
  void end_watch();
  void check_parameters(const ManagedParameters& parameters) const;
  std::vector<size_t> delayed_in(const ManagedParameters& parameters) const;
  void begin_precision(const ManagedParameters& all);
  void lower_parameters(c10::function_ref<void(nn::TensorVisitor)> for_each_input);
  CommHook hook_for_reducer() const;
  std::string describe_options() const;
  void move_inputs(c10::function_ref<void(nn::TensorVisitor)> for_each_input) const;
  /// Parameters that were frozen when the engine was made may require grad since.
  void follow_frozen();
  void sync_buffers();
  void watch_outputs(c10::function_ref<void(nn::TensorVisitor)> for_each_output);
  std::shared_ptr<void> watch_graph(
      c10::function_ref<void(nn::TensorVisitor)> for_each_output) const;

  torch::nn::Module& module_;
  ReplicateOptions options_;
  Boundary boundary_;
  std::set<const torch::nn::Module*> ignored_;
  std::optional<c10::Device> device_;  // where inputs go
  Group group_;
  Group join_group_;
  Announce announce_;  // inside a Join
  bool announces_forward_ = false;
  bool requires_sync_ = true;
  CommHook hook_;
  std::unique_ptr<Engine> engine_;
  std::vector<HookHandle> watch_;    // until there is an engine
  std::vector<at::Tensor> managed_;  // registered as this engine's
  std::vector<at::Tensor> frozen_;   // when it was made
  std::vector<at::Tensor> buffers_;
  std::shared_ptr<LoweredParameters> lowered_;  // null without mixed precision
  bool lowered_here_ = false;                   // by the forward that runs
  std::chrono::steady_clock::time_point forward_began_;
};

std::shared_ptr<State> state_of(const torch::nn::Module& module);
/// Those of the module and its parts, each once, in the order of the modules. Throws if there are
/// none.
std::vector<std::shared_ptr<State>> states_in(const torch::nn::Module& module,
                                              const char* function);
/// Throws, in the name of `function`, if the module or a part is fully sharded.
void refuse_sharded(const torch::nn::Module& module, const char* function);
std::shared_ptr<State> apply(torch::nn::Module& module, ReplicateOptions options, bool is_wrapped);

}  // namespace tessera::detail::replicate
