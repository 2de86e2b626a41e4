#include "fully_shard/state_impl.h"

#include "base/autograd.h"
#include "base/capture.h"
#include "nn/module_hooks.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera::detail::fully_shard {
namespace {

struct Member {
  std::shared_ptr<State> state;
  std::string path;
};

/// Those of the module and its parts; replicated parts are trees of their own.
void collect_members(const torch::nn::Module& module, const std::string& path,
                     std::vector<Member>& members) {
  if (nn::find_state(module, "replicate")) return;
  if (const auto state = state_of(module);
      state && std::none_of(members.begin(), members.end(),
                            [&](const auto& member) { return member.state == state; }))
    members.push_back({state, path});
  for (const auto& child : module.named_children())
    collect_members(*child.value(), path.empty() ? child.key() : path + "." + child.key(), members);
}

void cast(at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
}

}  // namespace

State::State(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options,
             std::shared_ptr<Unit> unit, std::vector<CastBuffer> buffers)
    : reshard_after_forward(options.reshard_after_forward),
      modules_(std::move(modules)),
      name_(nn::name_of(*modules_[0])),
      precision_(options.mixed_precision),
      strategy_(options.strategy),
      prefetches_forward_(options.forward_prefetch),
      unit_(std::move(unit)),
      buffers_(std::move(buffers)) {}

State::~State() = default;

void State::attach() {
  unit_->on_complete = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->complete();
  };
  unit_->on_unexpected_gradient = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->begin_unexpected_backward();
  };
  for (auto* module : modules_) {
    auto& hooks = nn::require_hook_point(*module, kName).hooks();
    // Before all others that are there, which then see whole parameters and cast inputs; and after
    // them. The module owns the hooks, so they end together.
    hooks.add(
        [weak = weak_from_this()](torch::nn::Module&, nn::Arguments& arguments) {
          weak.lock()->before_forward(arguments);
        },
        nn::ForwardPreHookOptions{.prepend = true});
    hooks.add(
        [weak = weak_from_this()](torch::nn::Module& called, nn::Arguments&, nn::Result& result) {
          weak.lock()->after_forward(called, result);
        },
        nn::ForwardHookOptions{.prepend = false, .always_call = true});
  }
  hook_inputs();
}

/// Those of calls to come: parameters may be frozen later.
void State::hook_inputs() {
  if (waits_for_inputs_ || !unit_->has_frozen()) return;
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
  std::vector<Member> members;
  for (const auto* module : modules_) collect_members(*module, "", members);
  std::vector<std::weak_ptr<State>> states;
  for (const auto& member : members) states.push_back(member.state);
  tree_ = std::make_shared<Tree>(std::move(states));
  for (const auto& [state, path] : members) {
    state->tree_ = tree_;
    state->path_ = path;
    state->unit_->where = state->describe();
    state->is_root_ = state.get() == this;
  }
}

std::string State::describe() const {
  return path_.empty() ? name_ : "'" + path_ + "' (" + name_ + ")";
}

void State::cast_inputs(nn::Arguments& arguments) const {
  const bool is_cast =
      precision_.cast_forward_inputs || (is_root_ && precision_.cast_root_forward_inputs);
  if (!precision_.param_dtype || !is_cast || computes_in_full(Use::Forward)) return;
  arguments.for_each_tensor([&](at::Tensor& tensor) { cast(tensor, *precision_.param_dtype); });
}

void State::cast_outputs(const nn::Result& result) const {
  if (!precision_.output_dtype) return;
  result.for_each_tensor([&](at::Tensor& tensor) { cast(tensor, *precision_.output_dtype); });
}

/// Backward as the forward it belongs to.
bool State::computes_in_full(Use use) const {
  if (use == Use::Backward) return was_in_full_;
  return precision_.full_precision_in_eval.value_or(false) && !modules_[0]->is_training();
}

void State::choose_precision(Use use) {
  const bool full = computes_in_full(use);
  unit_->compute_in_full(full);
  for (const auto& buffer : buffers_) buffer.cast(full);
}

void State::gather_ahead(Use use) {
  if (unit_->is_unsharded() || !unit_->works_in_background()) return;
  choose_precision(use);
  unit_->prefetch(use);
}

void State::prefetch(Use use) {
  const auto& wished = use == Use::Forward ? forward_prefetch : backward_prefetch;
  for (const auto& other : wished) {
    if (const auto state = other.lock()) state->gather_ahead(use);
  }
  if (!wished.empty()) return;
  if (use == Use::Backward) return tree_->prefetch_backward(*this);
  if (prefetches_forward_.value_or(true)) tree_->prefetch_forward(*this);
}

void State::before_forward(nn::Arguments& arguments) {
  const bool is_again = is_in_backward();
  // A checkpoint computes again what is whole already; otherwise a backward has failed.
  if (phase_ == Phase::Backward && is_again) return cast_inputs(arguments);
  if (phase_ == Phase::Backward) recover();
  if (!tree_) become_root();
  if (is_root_ && !is_again && phase_ == Phase::Idle) tree_->begin_forward();
  cast_inputs(arguments);
  if (phase_ == Phase::Forward) return;  // another module of the unit, or one of them again
  hook_inputs();
  if (!is_again) tree_->enter(*this);
  choose_precision(Use::Forward);
  unit_->unshard(Use::Forward);
  to_run_.assign(modules_.begin(), modules_.end());
  expects_backward_ = false;
  phase_ = Phase::Forward;
  if (!is_again) prefetch(Use::Forward);
}

bool State::watch_outputs(const nn::Result& result) {
  bool shows_tensor = false;
  bool expects_backward = false;
  result.for_each_tensor([&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    shows_tensor = true;
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

Keep State::kept_after_forward(bool expects_backward) const {
  if (!expects_backward) return Keep::Nothing;
  if (reshard_after_forward && reshard_after_forward->frees())
    return reshard_after_forward->ranks() ? Keep::Part : Keep::Nothing;
  // A recording is to be the same at each call, and the first has no forward before it.
  const bool runs_last = capture::observer() == nullptr && tree_->runs_last(*this);
  const bool keeps = reshard_after_forward || is_root_ || runs_last ||
                     strategy_ == ShardingStrategy::SHARD_GRAD_OP ||
                     strategy_ == ShardingStrategy::HYBRID_SHARD_ZERO2;
  return keeps ? Keep::All : Keep::Nothing;
}

void State::after_forward(const torch::nn::Module& module, const nn::Result& result) {
  const bool has_failed = result.has_failed();
  if (phase_ == Phase::Idle || (phase_ == Phase::Backward && has_failed)) return;
  if (has_failed) return leave_forward();
  cast_outputs(result);
  if (phase_ == Phase::Backward) return;
  try {
    expects_backward_ = watch_outputs(result) || expects_backward_;
  } catch (...) {
    leave_forward();
    throw;
  }
  std::erase(to_run_, &module);
  if (!to_run_.empty()) return;
  end_forward();
  if (is_root_ && !is_in_backward()) tree_->end_forward();
}

void State::end_forward() {
  if (phase_ != Phase::Forward) return;
  phase_ = Phase::Idle;
  to_run_.clear();
  if (expects_backward_) was_in_full_ = computes_in_full(Use::Forward);
  unit_->reshard(kept_after_forward(expects_backward_ && !is_in_backward()), expects_backward_);
}

/// By an exception.
void State::leave_forward() {
  phase_ = Phase::Idle;
  to_run_.clear();
  unit_->abandon_values();
}

void State::before_backward() {
  const int backward = torch::autograd::get_current_graph_task_id();
  // Without gradients to wait for, each call of the module is complete on its own.
  const bool is_complete = completed_in_ == backward && unit_->has_trainable();
  if (phase_ == Phase::Backward || is_complete) return;
  tree_->expect_end_of_backward();
  choose_precision(Use::Backward);
  unit_->unshard(Use::Backward);
  if (!std::exchange(has_unexpected_, false)) begin_gradients();
  phase_ = Phase::Backward;
  to_run_.clear();
  modules_through_ = 0;
  completed_in_ = -1;
  prefetch(Use::Backward);
}

/// No output of the unit told of a backward. What comes is reduced with the rest, or at the end.
void State::begin_unexpected_backward() {
  if (!tree_) become_root();
  tree_->expect_end_of_backward();
  begin_gradients();
  has_unexpected_ = true;
}

/// Those of a backward before this one, or around it, may be on their way.
void State::begin_gradients() {
  if (unit_->has_undelivered()) tree_->deliver();
  unit_->begin_backward();
}

void State::complete() {
  // A frozen parameter may be read after the last gradient came.
  if (phase_ == Phase::Backward && !unit_->has_frozen()) finish_backward();
}

void State::after_inputs(const std::vector<at::Tensor>& grad_inputs) {
  const bool is_through = std::any_of(grad_inputs.begin(), grad_inputs.end(),
                                      [](const auto& gradient) { return gradient.defined(); });
  // Without gradients of inputs it is called too early.
  if (phase_ != Phase::Backward || !is_through) return;
  if (++modules_through_ >= modules_.size() && unit_->has_all_gradients()) finish_backward();
}

void State::finish_backward() {
  const bool had_unexpected = std::exchange(has_unexpected_, false);
  if (phase_ == Phase::Backward) {
    phase_ = Phase::Idle;
    completed_in_ = torch::autograd::get_current_graph_task_id();
    return reduce(/*was_whole=*/true);
  }
  if (!had_unexpected) return;
  if (unit_->has_gradients())
    reduce(/*was_whole=*/false);
  else
    unit_->abandon_backward();
}

void State::reduce_earlier() {
  if (phase_ != Phase::Idle || !unit_->requires_sync() || !unit_->has_unreduced()) return;
  begin_gradients();
  reduce(/*was_whole=*/false);
}

void State::reduce(bool was_whole) {
  const bool in_background = unit_->works_in_background();
  unit_->reduce(in_background);
  if (was_whole)
    unit_->reshard(reshard_after_backward ? Keep::Nothing : Keep::All, /*expects_backward=*/false);
  if (in_background)
    tree_->add_reducing(unit_);
  else
    unit_->deliver();
}

void State::recover() {
  if (phase_ == Phase::Idle && !has_unexpected_) return;
  has_unexpected_ = false;
  unit_->abandon_backward();
  leave_forward();
}

bool State::recover_backward() {
  if (phase_ == Phase::Backward || has_unexpected_) recover();
  return unit_->drop_unreduced();
}

void State::unshard() {
  choose_precision(Use::Forward);
  unit_->unshard(Use::Forward);
}

void State::reshard() {
  recover();
  unit_->reshard(Keep::Nothing, /*expects_backward=*/true);
}

}  // namespace tessera::detail::fully_shard
