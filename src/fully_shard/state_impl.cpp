#include "fully_shard/state_impl.h"

#include "base/open_backwards.h"
#include "nn/module_hooks.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera::sharded {
namespace {

/// Those of the module and its parts; replicated parts are trees of their own.
void collect_states(const torch::nn::Module& module, std::vector<std::weak_ptr<State>>& states,
                    std::vector<const State*>& seen) {
  if (nn::find_state(module, "replicate")) return;
  if (const auto state = state_of(module);
      state && std::find(seen.begin(), seen.end(), state.get()) == seen.end()) {
    seen.push_back(state.get());
    states.push_back(state);
  }
  for (const auto& child : module.children()) collect_states(*child, states, seen);
}

void cast(at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
}

}  // namespace

State::State(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options,
             std::shared_ptr<Unit> unit)
    : reshard_after_forward(options.reshard_after_forward),
      modules_(std::move(modules)),
      name_(nn::name_of(*modules_[0])),
      precision_(options.mixed_precision),
      strategy_(options.strategy),
      prefetches_forward_(options.forward_prefetch),
      unit_(std::move(unit)) {}

State::~State() = default;

void State::attach() {
  unit_->on_complete = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->complete();
  };
  for (auto* module : modules_) {
    auto& hooks = nn::require_hook_point(*module, kName).hooks();
    // Before all others, which then see whole parameters and cast inputs; after all others. The
    // module owns the hooks, so they end together.
    hooks.add(
        [weak = weak_from_this()](torch::nn::Module&, nn::Arguments& arguments) {
          weak.lock()->before_forward(arguments);
        },
        nn::ForwardPreHookOptions{.prepend = true});
    hooks.add([weak = weak_from_this()](torch::nn::Module&, nn::Arguments&,
                                        nn::Result& result) { weak.lock()->after_forward(result); },
              nn::ForwardHookOptions{.prepend = false, .always_call = true});
  }
  if (!unit_->has_frozen()) return;
  waits_for_inputs_ = true;
  for (auto* module : modules_) {
    register_full_backward_hook(
        *module, [weak = weak_from_this()](torch::nn::Module&, std::vector<at::Tensor>& grad_inputs,
                                           const std::vector<at::Tensor>&) {
          if (const auto self = weak.lock()) self->after_inputs(grad_inputs);
        });
  }
}

void State::become_root() {
  std::vector<std::weak_ptr<State>> members;
  std::vector<const State*> seen;
  for (const auto* module : modules_) collect_states(*module, members, seen);
  tree_ = std::make_shared<Tree>(members);
  for (const auto& member : members) {
    const auto state = member.lock();
    state->tree_ = tree_;
    state->is_root_ = state.get() == this;
  }
}

void State::cast_inputs(nn::Arguments& arguments) const {
  const bool is_cast =
      precision_.cast_forward_inputs || (is_root_ && precision_.cast_root_forward_inputs);
  if (!precision_.param_dtype || !is_cast) return;
  arguments.for_each_tensor([&](at::Tensor& tensor) { cast(tensor, *precision_.param_dtype); });
}

void State::prefetch(Use use) {
  const auto& wished = use == Use::Forward ? forward_prefetch : backward_prefetch;
  for (const auto& other : wished) {
    if (const auto state = other.lock()) state->unit_->prefetch(use);
  }
  if (!wished.empty()) return;
  if (use == Use::Backward) return tree_->prefetch_backward(*this);
  if (prefetches_forward_.value_or(true)) tree_->prefetch_forward(*this);
}

void State::before_forward(nn::Arguments& arguments) {
  const bool is_again = is_in_backward();
  // A checkpoint computes again what is whole already; otherwise a backward has failed.
  if (phase_ == Phase::Backward && is_again) return;
  if (phase_ == Phase::Backward) recover();
  if (!tree_) become_root();
  if (is_root_ && !is_again && calls_left_ == 0) tree_->begin_forward();
  cast_inputs(arguments);
  if (calls_left_ > 0) return;
  unit_->show_whole(Use::Forward);
  calls_left_ = modules_.size();
  phase_ = Phase::Forward;
  if (is_again) return;
  tree_->enter(*this);
  prefetch(Use::Forward);
}

bool State::watch_outputs(const nn::Result& result) {
  bool shows_tensor = false;
  bool expects_backward = false;
  result.for_each_tensor([&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    shows_tensor = true;
    if (precision_.output_dtype) cast(tensor, *precision_.output_dtype);
    if (!tensor.requires_grad() || tensor.is_leaf()) return;
    expects_backward = true;
    tensor.register_hook([weak = weak_from_this()](const at::TensorBase&) {
      if (const auto self = weak.lock()) self->before_backward();
    });
  });
  TORCH_CHECK(shows_tensor || !c10::GradMode::is_enabled() || !unit_->has_trainable(),
              "fully_shard: expected the forward of ", name_,
              " to return tensors, whose gradients tell when its backward begins, but none was "
              "found; return tensors, or containers or structs of them (structs opt in with "
              "tessera_tensors)");
  return expects_backward;
}

bool State::keeps_after_forward(bool expects_backward) const {
  if (!expects_backward) return false;
  if (reshard_after_forward) return !*reshard_after_forward;
  return is_root_ || strategy_ == ShardingStrategy::SHARD_GRAD_OP ||
         strategy_ == ShardingStrategy::HYBRID_SHARD_ZERO2;
}

void State::after_forward(const nn::Result& result) {
  if (phase_ != Phase::Forward) return;
  if (result.has_failed()) return recover();
  bool expects_backward = false;
  try {
    expects_backward = watch_outputs(result);
  } catch (...) {
    recover();
    throw;
  }
  if (--calls_left_ > 0) return;
  phase_ = Phase::Idle;
  const bool is_again = is_in_backward();
  unit_->show_shards(keeps_after_forward(expects_backward && !is_again));
  if (is_root_ && !is_again) tree_->end_forward();
}

void State::before_backward() {
  const int backward = torch::autograd::get_current_graph_task_id();
  // Without gradients to wait for, each call of the module is complete on its own.
  const bool is_complete = completed_in_ == backward && unit_->has_trainable();
  if (phase_ == Phase::Backward || is_complete) return;
  tree_->expect_end_of_backward();
  unit_->show_whole(Use::Backward);
  unit_->begin_backward();
  phase_ = Phase::Backward;
  modules_through_ = 0;
  completed_in_ = -1;
  prefetch(Use::Backward);
}

void State::complete() {
  if (phase_ == Phase::Backward && !waits_for_inputs_) finish_backward();
}

void State::after_inputs(const std::vector<at::Tensor>& grad_inputs) {
  const bool is_through = std::any_of(grad_inputs.begin(), grad_inputs.end(),
                                      [](const auto& gradient) { return gradient.defined(); });
  // Without gradients of inputs it is called too early.
  if (phase_ != Phase::Backward || !is_through) return;
  if (++modules_through_ >= modules_.size() && unit_->has_all_gradients()) finish_backward();
}

void State::finish_backward() {
  if (phase_ != Phase::Backward) return;
  phase_ = Phase::Idle;
  completed_in_ = torch::autograd::get_current_graph_task_id();
  const bool in_background = unit_->works_in_background();
  unit_->reduce(unit_->requires_sync, in_background);
  unit_->show_shards(/*keeps_memory=*/!reshard_after_backward);
  if (in_background)
    tree_->add_reducing(unit_);
  else
    unit_->deliver();
}

void State::recover() {
  if (phase_ == Phase::Idle) return;
  phase_ = Phase::Idle;
  calls_left_ = 0;
  unit_->abandon();
}

void State::unshard() { unit_->show_whole(Use::Forward); }

void State::reshard() {
  recover();
  unit_->show_shards(/*keeps_memory=*/false);
}

}  // namespace tessera::sharded
