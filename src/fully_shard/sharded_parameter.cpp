#include "fully_shard/sharded_parameter.h"

#include "dtensor/part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace tessera::detail::fully_shard {
namespace {

auto no_accumulator() {
  using Accumulator = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  return Accumulator(decltype(std::declval<Accumulator>().lock())());
}

}  // namespace

ShardedParameter::ShardedParameter(at::Tensor parameter, at::Tensor sharded, at::Tensor unsharded)
    : parameter_(std::move(parameter)),
      sharded_(std::move(sharded)),
      unsharded_(std::move(unsharded)),
      hidden_accumulator_(no_accumulator()),
      sharded_accumulator_(no_accumulator()),
      copy_accumulator_(no_accumulator()) {}

void ShardedParameter::show(const at::Tensor& form) {
  auto* impl = parameter_.unsafeGetTensorImpl();
  impl->shallow_copy_from(form.getIntrusivePtr());
  // Copying leaves it alone if the form has none.
  if (!dtensor::has_part(form) && impl->get_backend_meta() != nullptr)
    impl->set_backend_meta(nullptr);
}

void ShardedParameter::to_sharded() {
  show(sharded_);
  if (std::exchange(is_unsharded_, false))
    std::swap(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
              hidden_accumulator_);
}

void ShardedParameter::to_unsharded() {
  show(unsharded_);
  unsharded_version_ = parameter_._version();
  if (!std::exchange(is_unsharded_, true))
    std::swap(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
              hidden_accumulator_);
}

void ShardedParameter::set_unsharded(at::Tensor unsharded) {
  unsharded_ = std::move(unsharded);
  hidden_accumulator_ = no_accumulator();  // it knows the dtype of the other form
}

void ShardedParameter::show_copy(const at::Tensor& copy) {
  show(copy);
  sharded_accumulator_ =
      std::exchange(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
                    no_accumulator());
}

void ShardedParameter::end_copy() {
  show(sharded_);
  copy_accumulator_ =
      std::exchange(torch::autograd::impl::materialize_autograd_meta(parameter_)->grad_accumulator_,
                    std::exchange(sharded_accumulator_, no_accumulator()));
}

bool ShardedParameter::is_sharded_reached() const {
  const auto node = torch::autograd::get_current_node();
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter_);
  const auto outer = is_unsharded_ ? hidden_accumulator_.lock() : meta->grad_accumulator_.lock();
  return node && outer.get() == node.get();
}

bool ShardedParameter::was_sharded_exchanged() const {
  if (parameter_.scalar_type() != sharded_.scalar_type()) return true;
  if (!dtensor::has_part(sharded_))
    return dtensor::has_part(parameter_) || !parameter_.is_alias_of(sharded_);
  return parameter_.unsafeGetTensorImpl()->get_backend_meta() !=
         sharded_.unsafeGetTensorImpl()->get_backend_meta();
}

bool ShardedParameter::is_copy_in_graph() const { return copy_accumulator_.lock() != nullptr; }

namespace {

using dtensor::Spec;
using dtensor::SpecPtr;

/// The mesh with the dimensions of both, which are slices of one.
DeviceMesh joined_mesh(const DeviceMesh& data, const DeviceMesh& tensor, const std::string& name) {
  const auto root = data.root();
  auto names = data.dim_names();
  const auto& others = tensor.dim_names();
  const bool is_sliced = root == tensor.root() && !names.empty() && !others.empty() &&
                         std::none_of(others.begin(), others.end(), [&](const auto& other) {
                           return std::find(names.begin(), names.end(), other) != names.end();
                         });
  TORCH_CHECK_VALUE(is_sliced, "fully_shard: expected the mesh ", c10::str(data),
                    " and that of the tensor parallel parameter '", name, "', ", c10::str(tensor),
                    ", to be different dimensions of one mesh; make one with "
                    "init_device_mesh(device, shape, {\"dp\", \"tp\"}) and pass its slices");
  names.insert(names.end(), others.begin(), others.end());
  return root[names];
}

}  // namespace

SpecPtr sharded_spec(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh,
                     std::optional<int64_t> shard_dim) {
  const bool is_distributed = dtensor::has_part(parameter);
  const auto whole =
      is_distributed ? joined_mesh(mesh, dtensor::part_of(parameter).spec->mesh, name) : mesh;
  Placements placements(static_cast<size_t>(whole.ndim()));
  const auto& names = whole.dim_names();
  const auto position = [&](const DeviceMesh& part, size_t dim) -> size_t {
    if (!is_distributed) return dim;
    const auto found = std::find(names.begin(), names.end(), part.dim_names()[dim]);
    return static_cast<size_t>(found - names.begin());
  };
  if (is_distributed) {
    const Spec& spec = *dtensor::part_of(parameter).spec;
    for (size_t dim = 0; dim < spec.placements.size(); ++dim)
      placements[position(spec.mesh, dim)] = spec.placements[dim];
  }
  const auto shape = whole.shape();
  if (shard_dim && parameter.dim() > 0) {
    const auto last = position(mesh, static_cast<size_t>(mesh.ndim() - 1));
    placements[last] = dtensor::shard_last(placements, shape, last, *shard_dim);
  }
  return dtensor::make_spec(whole, dtensor::canonical(placements, shape));
}

}  // namespace tessera::detail::fully_shard
