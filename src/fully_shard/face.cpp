#include "fully_shard/face.h"

#include "dtensor/part.h"

#include <torch/csrc/autograd/function.h>

namespace tessera::sharded {
namespace {

auto no_accumulator() {
  using Accumulator = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  return Accumulator(decltype(std::declval<Accumulator>().lock())());
}

}  // namespace

TwoFaced::TwoFaced(at::Tensor parameter, at::Tensor outside, at::Tensor inside)
    : parameter_(std::move(parameter)),
      outside_(std::move(outside)),
      inside_(std::move(inside)),
      hidden_accumulator_(no_accumulator()),
      outer_accumulator_(no_accumulator()),
      copy_accumulator_(no_accumulator()) {}

void TwoFaced::show(const at::Tensor& face) {
  auto* impl = parameter_.unsafeGetTensorImpl();
  impl->shallow_copy_from(face.getIntrusivePtr());
  // Copying leaves it alone if the face has none.
  if (!dtensor::has_part(face) && impl->get_backend_meta() != nullptr)
    impl->set_backend_meta(nullptr);
}

void TwoFaced::show_outside() {
  show(outside_);
  if (std::exchange(is_inside_, false))
    std::swap(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
              hidden_accumulator_);
}

void TwoFaced::show_inside() {
  show(inside_);
  version_inside_ = parameter_._version();
  if (!std::exchange(is_inside_, true))
    std::swap(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
              hidden_accumulator_);
}

void TwoFaced::set_inside(at::Tensor inside) {
  inside_ = std::move(inside);
  hidden_accumulator_ = no_accumulator();  // it knows the dtype of the other face
}

void TwoFaced::show_copy(const at::Tensor& copy) {
  show(copy);
  outer_accumulator_ =
      std::exchange(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
                    no_accumulator());
}

void TwoFaced::end_copy() {
  show(outside_);
  copy_accumulator_ =
      std::exchange(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
                    std::exchange(outer_accumulator_, no_accumulator()));
}

bool TwoFaced::is_reached_outside() const {
  const auto node = torch::autograd::get_current_node();
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter_);
  const auto outer = is_inside_ ? hidden_accumulator_.lock() : meta->grad_accumulator_.lock();
  return node && outer.get() == node.get();
}

bool TwoFaced::was_exchanged_outside() const {
  if (parameter_.scalar_type() != outside_.scalar_type()) return true;
  if (!dtensor::has_part(outside_))
    return dtensor::has_part(parameter_) || !parameter_.is_alias_of(outside_);
  return parameter_.unsafeGetTensorImpl()->get_backend_meta() !=
         outside_.unsafeGetTensorImpl()->get_backend_meta();
}

bool TwoFaced::is_copy_in_graph() const { return copy_accumulator_.lock() != nullptr; }

}  // namespace tessera::sharded
