// Whole tensors and modules become distributed.
#include <tessera/dtensor.h>
#include <tessera/nn/hooks.h>

#include "base/storage.h"
#include "comm/call_check.h"
#include "dtensor/agreement.h"
#include "dtensor/collectives.h"
#include "dtensor/part.h"
#include "dtensor/random.h"
#include "dtensor/redistribute.h"
#include "dtensor/registration.h"
#include "nn/composable.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera {
namespace {

using dtensor::Spec;
using dtensor::SpecPtr;

SpecPtr spec_for(const char* caller, const at::Tensor& tensor, const DeviceMesh& mesh,
                 Placements placements) {
  TORCH_CHECK_VALUE(tensor.defined(), caller, ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(
      !is_dtensor(tensor), caller, ": expected a plain tensor, got one distributed as ",
      c10::str(DTensor::of(tensor).placements()), "; use redistribute to place it otherwise");
  TORCH_CHECK_VALUE(tensor.is_leaf(), caller, ": expected a leaf tensor, got a result of ",
                    tensor.grad_fn()->name(),
                    "; detach() it, or use DTensor::from_local, which is differentiable");
  dtensor::ensure_registered();
  const auto normal = dtensor::normalize(caller, std::move(placements), tensor.dim(), mesh.ndim());
  const auto spec = dtensor::make_spec(mesh, normal);
  return dtensor::make_spec(mesh, dtensor::canonical(normal, spec->mesh_shape));
}

void check_source(const char* caller, const Spec& spec, std::optional<int> source) {
  for (size_t dim = 0; source && dim < spec.mesh_shape.size(); ++dim) {
    TORCH_CHECK_VALUE(*source >= 0 && *source < spec.mesh_shape[dim], caller,
                      ": expected a src_data_rank from 0 to ", spec.mesh_shape[dim] - 1,
                      ", an index along mesh dimension ", dim, ", got ", *source);
  }
}

/// Cut from the whole that a rank has. Partial and strided shards need a way of several steps.
at::Tensor cut(const char* caller, const at::Tensor& whole, const Spec& spec) {
  const auto whole_spec = dtensor::replicated(spec);
  const auto path = dtensor::require_path(caller, *whole_spec, spec, whole.sizes(),
                                          static_cast<int64_t>(whole.itemsize()));
  return dtensor::run_path(path, whole, *whole_spec, whole.sizes());
}

/// Along one mesh dimension after the other, the source sends each rank its chunk, or all of it.
at::Tensor receive(const char* caller, const at::Tensor& tensor, const Spec& spec, int source) {
  const bool in_order = std::none_of(spec.placements.begin(), spec.placements.end(),
                                     [](const auto& placement) { return placement.is_strided(); });
  const bool scatters = in_order && !spec.has_partial;
  auto local = tensor;
  for (size_t dim = 0; dim < spec.groups.size(); ++dim) {
    if (spec.mesh_shape[dim] == 1) continue;
    TORCH_CHECK_VALUE(!tensor.is_meta(), caller, ": expected a tensor with values for rank ",
                      source, " to send, got one on the meta device; pass std::nullopt as ",
                      "src_data_rank, or give it memory first");
    const auto& placement = spec.placements[dim];
    local = scatters && placement.is_shard()
                ? dtensor::scatter_chunks(local, placement.dim(), source, spec.groups[dim])
                : dtensor::broadcast_from(local, source, spec.groups[dim]).wait();
  }
  return scatters ? local : cut(caller, local, spec);
}

/// This rank's part of the source's tensor, in memory of its own.
at::Tensor part_from_source(const char* caller, const at::Tensor& tensor, const SpecPtr& spec,
                            std::optional<int> source) {
  const at::NoGradGuard no_grad;
  if (!spec->is_member) return dtensor::empty_local(tensor.options().requires_grad(false));
  check_source(caller, *spec, source);
  if (source) dtensor::check_same(caller, tensor, *spec, *source);
  const comm::Bookkeeping bookkeeping(caller);
  const auto whole = dtensor::without_bits(tensor.detach());
  const auto local = source ? receive(caller, whole, *spec, *source) : cut(caller, whole, *spec);
  return same_storage(local, tensor) ? local.clone() : local.contiguous();
}

struct DistributedState final : nn::ComposableState {};

}  // namespace

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                          std::optional<int> src_data_rank) {
  const auto spec = spec_for("distribute_tensor", tensor, mesh, std::move(placements));
  auto local = part_from_source("distribute_tensor", tensor, spec, src_data_rank);
  auto result = dtensor::wrap(std::move(local), spec, tensor.sizes(),
                              dtensor::dense_strides_like(tensor.sizes(), tensor.strides()));
  return DTensor::of(result.set_requires_grad(tensor.requires_grad()));
}

void distribute_tensor_(at::Tensor tensor, const DeviceMesh& mesh, Placements placements,
                        std::optional<int> src_data_rank) {
  const auto spec = spec_for("distribute_tensor_", tensor, mesh, std::move(placements));
  auto local = part_from_source("distribute_tensor_", tensor, spec, src_data_rank);
  auto gradient = tensor.grad();
  if (gradient.defined()) {
    // The gradient of each rank belongs to the values it had: no exchange.
    gradient = distribute_tensor(gradient.detach(), mesh, spec->placements, std::nullopt);
    tensor.mutable_grad() = at::Tensor();
  }
  // Whoever writes to the part writes to the tensor: autograd must notice either way.
  local.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  dtensor::become_distributed(tensor, std::move(local), spec);
  if (gradient.defined()) tensor.mutable_grad() = gradient;
}

void detail::distribute(torch::nn::Module& module, const DeviceMesh& mesh,
                        const PartitionFunction& partition, InputFunction input,
                        OutputFunction output) {
  nn::apply_composable(module, {.function = "distribute_module"}, [&] {
    for (const auto& entry : module.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
      if (partition) partition(entry.key(), *entry.value(), mesh);
    }
    if (partition) partition("", module, mesh);
    for (auto& parameter : module.parameters()) {
      if (!is_dtensor(parameter)) distribute_tensor_(parameter, mesh);
    }
    for (auto& buffer : module.buffers()) {
      if (buffer.defined() && !is_dtensor(buffer)) distribute_tensor_(buffer, mesh);
    }
    if (input) {
      register_forward_pre_hook(module,
                                [input, mesh](torch::nn::Module& called, nn::Arguments& arguments) {
                                  input(called, arguments, mesh);
                                });
    }
    if (output) {
      register_forward_hook(
          module, [output, mesh](torch::nn::Module& called, nn::Arguments&, nn::Result& result) {
            output(called, result, mesh);
          });
    }
    return std::make_shared<DistributedState>();
  });
}

}  // namespace tessera

namespace tessera::dtensor {
namespace {

/// `make` gives this rank's part for its local sizes.
template <class Make>
DTensor make_distributed(const char* caller, at::IntArrayRef size, const DeviceMesh& mesh,
                         Placements placements, const at::TensorOptions& options,
                         const Make& make) {
  TORCH_CHECK_VALUE(std::all_of(size.begin(), size.end(), [](int64_t n) { return n >= 0; }), caller,
                    ": expected sizes that are not negative, got ", size);
  ensure_registered();
  const auto normal =
      normalize(caller, std::move(placements), static_cast<int64_t>(size.size()), mesh.ndim());
  const auto spec = make_spec(mesh, normal);
  TORCH_CHECK_VALUE(!spec->has_partial, caller, ": expected Shard or Replicate, got ",
                    c10::str(normal));
  const auto plain = options.requires_grad(false).device(
      options.has_device() ? options.device() : c10::Device(mesh.device_type()));
  auto local = spec->is_member ? make(*spec, plain) : empty_local(plain);
  auto result = wrap(std::move(local), spec, size, dense_strides_like(size, Sizes(size.size(), 0)));
  return DTensor::of(result.set_requires_grad(options.requires_grad()));
}

}  // namespace

DTensor full(at::IntArrayRef size, const at::Scalar& value, const DeviceMesh& mesh,
             Placements placements, const at::TensorOptions& options) {
  return make_distributed("dtensor::full", size, mesh, std::move(placements), options,
                          [&](const Spec& spec, const at::TensorOptions& plain) {
                            return at::full(spec.local_sizes(size), value, plain);
                          });
}

DTensor zeros(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements,
              const at::TensorOptions& options) {
  return full(size, 0, mesh, std::move(placements),
              options.has_dtype() ? options : options.dtype(c10::get_default_dtype()));
}

DTensor ones(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements,
             const at::TensorOptions& options) {
  return full(size, 1, mesh, std::move(placements),
              options.has_dtype() ? options : options.dtype(c10::get_default_dtype()));
}

DTensor empty(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements,
              const at::TensorOptions& options) {
  return make_distributed("dtensor::empty", size, mesh, std::move(placements), options,
                          [&](const Spec& spec, const at::TensorOptions& plain) {
                            return at::empty(spec.local_sizes(size), plain);
                          });
}

DTensor rand(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements,
             const at::TensorOptions& options) {
  return make_distributed("dtensor::rand", size, mesh, std::move(placements), options,
                          [&](const Spec& spec, const at::TensorOptions& plain) {
                            const MeshGenerator generator(spec, plain.device());
                            return draw_part(spec, at::empty(size, plain), [&](at::Tensor& whole) {
                              whole.uniform_(0, 1, generator.get());
                            });
                          });
}

DTensor randn(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements,
              const at::TensorOptions& options) {
  return make_distributed("dtensor::randn", size, mesh, std::move(placements), options,
                          [&](const Spec& spec, const at::TensorOptions& plain) {
                            const MeshGenerator generator(spec, plain.device());
                            return draw_part(spec, at::empty(size, plain), [&](at::Tensor& whole) {
                              whole.normal_(0, 1, generator.get());
                            });
                          });
}

}  // namespace tessera::dtensor
