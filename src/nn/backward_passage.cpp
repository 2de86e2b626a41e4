#include "nn/backward_passage.h"

#include "base/autograd_node.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace tessera::nn {
namespace {

using Tensors = std::vector<at::Tensor>;
using GradFunction = std::function<void(Tensors& gradients)>;

/// Hands the gradients that come by to a function and passes on what it leaves.
class Identity final : public torch::autograd::Node {
 public:
  Identity(torch::autograd::edge_list next, GradFunction function)
      : Node(std::move(next)), function_(std::move(function)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    function_(gradients);
    return std::move(gradients);
  }
  std::string name() const override { return "TesseraBackwardHook"; }

 private:
  GradFunction function_;
};

/// The tensors of a call that need a gradient, and where they are among all of its tensors.
struct NeedGrad {
  Tensors tensors;
  std::vector<size_t> positions;
  size_t count = 0;

  explicit NeedGrad(c10::function_ref<void(TensorVisitor)> for_each) {
    for_each([&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.requires_grad()) {
        tensors.push_back(tensor);
        positions.push_back(count);
      }
      ++count;
    });
  }
};

/// The tensor as `node` gives it out: a view that refuses in-place operators, which would change
/// the caller's tensor behind the node's back. Layouts without views have few such operators.
at::Tensor behind(const at::Tensor& tensor, const NodePtr& node) {
  const bool has_views = tensor.layout() == at::kStrided && !tensor.is_nested();
  auto alias = has_views ? tensor.view_as(tensor) : tensor.detach();
  torch::autograd::create_gradient_edge(alias, node);
  if (has_views) {
    torch::autograd::impl::get_view_autograd_meta(alias)->set_creation_meta(
        torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  }
  return alias;
}

/// Replaces the tensors that need a gradient by aliases behind an identity node. `function` sees
/// one gradient per tensor of the call, undefined for the others.
void put_boundary(const NeedGrad& need, c10::function_ref<void(TensorVisitor)> for_each,
                  const GradFunction& function) {
  auto spread = [function, positions = need.positions, count = need.count](Tensors& gradients) {
    Tensors all(count);
    for (size_t i = 0; i < positions.size(); ++i) all[positions[i]] = gradients[i];
    function(all);
    for (size_t i = 0; i < positions.size(); ++i) gradients[i] = all[positions[i]];
  };
  const auto node =
      make_node<Identity>(torch::autograd::collect_next_edges(need.tensors), std::move(spread));
  for_each([&](at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad()) return;
    tensor = behind(tensor, node);
  });
}

}  // namespace

BackwardPassage::BackwardPassage(torch::nn::Module& module, const ModuleHooks& hooks)
    : module_(module),
      alive_(module.weak_from_this().lock()),
      before_(hooks.before_backward()),
      after_(hooks.after_backward()) {}

void BackwardPassage::enter(const Arguments& arguments) {
  if (!c10::GradMode::is_enabled()) return;
  const auto for_each = [&](TensorVisitor visit) { arguments.for_each_tensor(visit); };
  const NeedGrad need(for_each);
  inputs_ = need.count;
  inputs_need_grad_ = !need.tensors.empty();
  if (!inputs_need_grad_ || after_.empty()) return;
  put_boundary(need, for_each, [self = shared_from_this()](Tensors& grad_inputs) {
    self->know_grad_inputs(grad_inputs);
  });
}

void BackwardPassage::leave(const Result& result) {
  if (!c10::GradMode::is_enabled()) return;
  const auto for_each = [&](TensorVisitor visit) { result.for_each_tensor(visit); };
  const NeedGrad need(for_each);
  if (need.tensors.empty()) return;
  put_boundary(need, for_each, [self = shared_from_this()](Tensors& grad_outputs) {
    self->know_grad_outputs(grad_outputs);
  });
}

void BackwardPassage::know_grad_outputs(Tensors& grad_outputs) {
  for (const auto& hook : before_) hook->run(module_, grad_outputs);
  if (inputs_need_grad_) {
    grad_outputs_ = grad_outputs;
    return;
  }
  for (const auto& hook : after_) {
    Tensors none(inputs_);
    hook->run(module_, none, grad_outputs);
  }
}

void BackwardPassage::know_grad_inputs(Tensors& grad_inputs) {
  // Reached past the outputs, e.g. through a tensor that forward left in a member.
  if (!grad_outputs_) return;
  const auto grad_outputs = *std::exchange(grad_outputs_, std::nullopt);
  for (const auto& hook : after_) hook->run(module_, grad_inputs, grad_outputs);
}

}  // namespace tessera::nn
