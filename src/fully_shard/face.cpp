#include "fully_shard/face.h"

#include "dtensor/part.h"

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
      outer_accumulator_(no_accumulator()) {}

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

void TwoFaced::show_copy(const at::Tensor& copy) {
  show(copy);
  outer_accumulator_ =
      std::exchange(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
                    no_accumulator());
}

void TwoFaced::end_copy() {
  show(outside_);
  torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_ =
      std::exchange(outer_accumulator_, no_accumulator());
}

}  // namespace tessera::sharded
