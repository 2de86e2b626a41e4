#include "replicate/iteration.h"

#include "base/text.h"

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace tessera::detail::replicate {
namespace {

const void* slot_of(const at::Tensor& parameter) {
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

}  // namespace

Iteration::Iteration(const ManagedParameters& parameters, IterationSettings settings)
    : parameters_(parameters),
      settings_(std::move(settings)),
      learns_uses_(settings_.static_graph),
      uses_(parameters.tensors.size(), 1) {}

void Iteration::add_hooked(const at::Tensor& parameter) { slots_.push_back(slot_of(parameter)); }

bool Iteration::is_averaged() const {
  return phase_ == Phase::Sync || (!settings_.has_forward && requires_sync_);
}

bool Iteration::takes() const {
  return phase_ != Phase::Local && (!begins_by_gradient() || requires_sync_);
}

void Iteration::begin_local() {
  // A forward before this one may still wait for its backward, which is to be averaged; if not,
  // this one's is, which changes no sum.
  if (phase_ != Phase::Sync) phase_ = Phase::Local;
  has_local_ = true;
}

bool Iteration::begin(const std::vector<size_t>& unused) {
  const bool was_given_up = phase_ != Phase::Sync && is_taking_;
  phase_ = Phase::Sync;
  is_taking_ = false;
  unused_ = unused;
  expected_ = uses_;
  is_missing_.assign(size(), false);
  order_.clear();
  taken_ = 0;
  if (learns_uses_) std::fill(uses_.begin(), uses_.end(), 0);
  return was_given_up;
}

void Iteration::end() {
  has_local_ = false;
  phase_ = Phase::Idle;
  is_taking_ = false;
}

std::vector<size_t> Iteration::known_unused() const {
  if (learns_uses_) return {};
  auto indices = unused_;
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (uses_[i] == 0 && std::ranges::find(unused_, i) == unused_.end()) indices.push_back(i);
  }
  return indices;
}

bool Iteration::arrive(size_t index) {
  if (learns_uses_) {
    if (uses_[index]++ == 0) order_.push_back(index);
    return false;
  }
  TORCH_CHECK(expected_[index] > 0, "replicate: parameter '", parameters_.names[index], "' of ",
              settings_.module_name,
              is_missing_[index]
                  ? " got a gradient, though the outputs of the last forward don't depend on it; "
                    "call forward once per backward"
                  : " got a second gradient before all parameters had one; still missing: ",
              is_missing_[index] ? "" : format_list(missing_names()),
              is_missing_[index] ? "" : "; every parameter must be used by every backward");
  if (--expected_[index] > 0) return false;
  order_.push_back(index);
  return true;
}

void Iteration::take(size_t index, bool is_missing) {
  is_missing_[index] = is_missing;
  expected_[index] = 0;
  ++taken_;
}

void Iteration::settle_uses() {
  learns_uses_ = false;
  expected_ = uses_;
}

std::vector<bool> Iteration::agree_on_used() const {
  std::vector<bool> is_used(size(), true);
  if (!may_miss()) return is_used;
  // What backwards before this one have added up is to be averaged, too.
  const auto has_gradient = [&](size_t i) {
    return !is_missing_[i] || (has_local_ && parameters_.tensors[i].grad().defined());
  };
  if (settings_.group->getSize() == 1) {
    for (size_t i = 0; i < is_used.size(); ++i) is_used[i] = has_gradient(i);
    return is_used;
  }
  std::vector<int32_t> counts;
  for (size_t i = 0; i < size(); ++i) counts.push_back(has_gradient(i) ? 1 : 0);
  const auto device = parameters_.tensors[0].device();
  std::vector<at::Tensor> used{at::tensor(counts, at::kInt).to(device)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  options.asyncOp = false;
  const auto work = settings_.group->getBackend(device.type())->allreduce(used, options);
  if (work) work->wait();
  const auto result = used[0].cpu();
  for (size_t i = 0; i < is_used.size(); ++i) is_used[i] = result.const_data_ptr<int32_t>()[i] > 0;
  return is_used;
}

std::vector<std::string> Iteration::missing_names() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < expected_.size(); ++i) {
    if (expected_[i] > 0) names.push_back(parameters_.names[i]);
  }
  return names;
}

bool Iteration::was_seen(size_t index) const {
  if (phase_ != Phase::Sync) return false;
  return learns_uses_ ? uses_[index] > 0 : expected_[index] == 0;
}

// libtorch has one slot for post-accumulate hooks per tensor; whoever writes it replaces ours.
void Iteration::check_hooks() const {
  if (!is_averaged()) return;
  // Where forwards are seen, the next one makes another engine.
  const bool is_thawed =
      !settings_.has_forward && std::any_of(settings_.frozen.begin(), settings_.frozen.end(),
                                            [](const auto& one) { return one.requires_grad(); });
  TORCH_CHECK(!is_thawed, "replicate: parameters of ", settings_.module_name,
              " were frozen when it was replicated and require grad, so their gradients were not "
              "averaged, and forwards of a plain module can't be seen; declare it with "
              "TESSERA_MODULE, or replicate it when all that is to be trained requires grad");
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& parameter = parameters_.tensors[i];
    TORCH_CHECK(settings_.has_forward || parameter.requires_grad(), "replicate: parameter '",
                parameters_.names[i], "' of ", settings_.module_name,
                " was frozen since it was replicated, so the others wait for its gradient, and "
                "forwards of a plain module can't be seen; declare it with TESSERA_MODULE, or "
                "freeze parameters before replicate");
    if (was_seen(i) || !parameter.grad().defined()) continue;
    TORCH_CHECK(slot_of(parameter) == slots_[i], "replicate: parameter '", parameters_.names[i],
                "' of ", settings_.module_name,
                " got a gradient that was not averaged, since somebody replaced its "
                "post-accumulate hook; add hooks with tessera::register_post_accumulate_grad_hook, "
                "which keeps the others");
  }
}

void Iteration::check_finished() {
  check_hooks();
  if (!has_begun()) return;
  give_up();  // told once
  for (size_t i = 0; i < expected_.size(); ++i)
    if (expected_[i] > 0) check_trained(i);
  TORCH_CHECK(false, "replicate: expected every parameter of ", settings_.module_name,
              " to get a gradient in the last backward before the next forward, but these got "
              "none: ",
              format_list(missing_names()),
              ". Either they are not used by the loss (pass find_unused_parameters = true, or "
              "ignored_modules), or backward ended early");
}

void Iteration::check_trained(size_t index) const {
  TORCH_CHECK(parameters_.tensors[index].requires_grad(), "replicate: parameter '",
              parameters_.names[index], "' of ", settings_.module_name,
              " was frozen (requires_grad is false) between a forward and its backward, so it got "
              "no gradient and nothing was averaged; freeze and thaw parameters before the "
              "forward, alike on all ranks");
}

void Iteration::check_gradient(size_t index) const {
  check_trained(index);
  const auto& parameter = parameters_.tensors[index];
  const auto& name = parameters_.names[index];
  TORCH_CHECK(phase_ != Phase::Idle, "replicate: parameter '", name, "' of ", settings_.module_name,
              " got a gradient, but there was no forward through the replicated module since its "
              "gradients were last averaged; call the module itself (not its parts, not a "
              "reference to its base class), and run backward after each forward: of several "
              "forwards before it one backward takes the sum of the losses");
  const auto& gradient = parameter.grad();
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.requires_grad(),
                              "replicate: expected a gradient without "
                              "a graph for parameter '",
                              name,
                              "', got one of backward(create_graph = true); gradients of averaged "
                              "gradients are not supported");
  TORCH_CHECK_TYPE(gradient.scalar_type() == parameter.scalar_type(),
                   "replicate: expected a gradient of ", parameter.scalar_type(),
                   " for parameter '", name, "', got ", gradient.scalar_type());
  TORCH_CHECK_TYPE(gradient.is_sparse() == parameters_.is_sparse[index], "replicate: expected a ",
                   parameters_.is_sparse[index] ? "sparse" : "dense", " gradient for parameter '",
                   name, "', got a ", gradient.is_sparse() ? "sparse" : "dense",
                   " one; gradients are taken for sparse where an Embedding or EmbeddingBag says "
                   "sparse(true)");
}

}  // namespace tessera::detail::replicate
