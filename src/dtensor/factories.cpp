#include <tessera/dtensor.h>

#include "dtensor/part.h"
#include "dtensor/random.h"
#include "dtensor/registration.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

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
