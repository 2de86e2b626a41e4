#include "dtensor/plain_loss.h"

#include "base/autograd_node.h"
#include "dtensor/differentiable.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <span>

namespace tessera::dtensor {
namespace {

// Note [losses stay plain]
// A plain tensor of one element beside distributed ones counts as a number that all ranks hold. A
// loss does not: in data parallel training each rank has its own, and the gradient that goes back
// through it must be plain. So where one meets a distributed tensor of one element, a penalty on
// parameters say, that one becomes plain, and so does the sum. What the ranks' losses are averaged
// to depends on the penalty by the average of the ranks' gradients; where all ranks hold the same
// loss, as in tensor parallel training, the average is what each has.

using torch::autograd::variable_list;

class PlainLossBackward final : public torch::autograd::Node {
 public:
  explicit PlainLossBackward(const at::Tensor& forward)
      : whole_(replicated(*part_of(forward).spec)),
        averaged_(
            make_spec(whole_->mesh, Placements(whole_->placements.size(), Partial(ReduceOp::AVG)))),
        sizes_(forward.sizes().vec()),
        strides_(forward.strides().vec()) {}
  std::string name() const override { return "TesseraPlainLossBackward"; }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {redistribute(from_local(gradients[0], averaged_, sizes_, strides_, whole_), whole_)};
  }

 private:
  const SpecPtr whole_;
  const SpecPtr averaged_;
  const Sizes sizes_;
  const Sizes strides_;
};

at::Tensor made_plain(const at::Tensor& tensor) {
  const auto whole = redistribute(tensor.detach(), replicated(*part_of(tensor).spec));
  auto plain = part_of(whole).local().clone();
  if (!c10::GradMode::is_enabled() || !tensor.requires_grad()) return plain;
  auto node = make_node<PlainLossBackward>(tensor);
  node->set_next_edges(torch::autograd::collect_next_edges(tensor));
  torch::autograd::set_history(plain, node);
  return plain;
}

bool is_loss(const at::Tensor& tensor) {
  return tensor.defined() && !has_part(tensor) && tensor.numel() == 1 && tensor.requires_grad();
}

bool can_be_plain(const at::Tensor& tensor) {
  return !has_part(tensor) || (tensor.numel() == 1 && part_of(tensor).spec->is_member);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

void keep_loss_plain(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  bool has_loss = false;
  bool fits = true;
  for (size_t i = 0; i < count; ++i) {
    if (!arguments[i].isTensor()) continue;
    const auto& tensor = arguments[i].toTensor();
    has_loss = has_loss || is_loss(tensor);
    fits = fits && can_be_plain(tensor) && !(has_part(tensor) && is_written(schema.arguments()[i]));
  }
  if (!has_loss || !fits) return op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);
  for (auto& value : arguments) {
    if (value.isTensor() && has_part(value.toTensor())) value = made_plain(value.toTensor());
  }
  op.callBoxed(*stack);
}

}  // namespace tessera::dtensor
