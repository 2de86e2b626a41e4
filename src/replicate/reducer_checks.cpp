// What a reducer refuses.
#include "base/text.h"
#include "replicate/reducer.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace tessera::replication {

const void* Reducer::slot_of(const at::Tensor& parameter) {
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

std::vector<std::string> Reducer::missing_names() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < expected_.size(); ++i) {
    if (expected_[i] > 0) names.push_back(parameters_.names[i]);
  }
  return names;
}

bool Reducer::was_seen(size_t index) const {
  if (phase_ != Phase::Sync) return false;
  return learns_uses_ ? uses_[index] > 0 : expected_[index] == 0;
}

// libtorch has one slot for post-accumulate hooks per tensor; whoever writes it replaces ours.
void Reducer::check_hooks() const {
  const bool is_averaged = phase_ == Phase::Sync || (!settings_.has_forward && requires_sync_);
  if (!is_averaged) return;
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

void Reducer::check_finished() {
  const std::lock_guard lock(mutex_);
  check_hooks();
  if (phase_ != Phase::Sync || !is_taking_) return;
  phase_ = Phase::Idle;  // told once; the next forward starts anew
  for (size_t i = 0; i < expected_.size(); ++i)
    if (expected_[i] > 0) check_trained(i);
  TORCH_CHECK(false, "replicate: expected every parameter of ", settings_.module_name,
              " to get a gradient in the last backward before the next forward, but these got "
              "none: ",
              format_list(missing_names()),
              ". Either they are not used by the loss (pass find_unused_parameters = true, or "
              "ignored_modules), or backward ended early");
}

void Reducer::check_trained(size_t index) const {
  TORCH_CHECK(parameters_.tensors[index].requires_grad(), "replicate: parameter '",
              parameters_.names[index], "' of ", settings_.module_name,
              " was frozen (requires_grad is false) between a forward and its backward, so it got "
              "no gradient and nothing was averaged; freeze and thaw parameters before the "
              "forward, alike on all ranks");
}

void Reducer::check_gradient(size_t index) const {
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

}  // namespace tessera::replication
