#pragma once

#include <tessera/dtensor.h>

#include "support/ranks.h"
#include "support/tolerance.h"

#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

/// Whole tensors, cut by hand: what distributed ones are compared with.
namespace tessera::testing {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

using MeshShape = std::vector<int64_t>;
using Sizes = std::vector<int64_t>;

/// The chunk rule, once more and by torch::chunk's definition.
inline at::Tensor chunk_by_hand(const at::Tensor& tensor, int64_t dim, int64_t ranks,
                                int64_t rank) {
  const int64_t size = tensor.size(dim);
  const int64_t each = (size + ranks - 1) / ranks;
  const int64_t begin = std::min(size, each * rank);
  return tensor.narrow(dim, begin, std::min(each, size - begin));
}

/// This rank's part. Partial(sum): unequal summands, of which some are negative.
inline at::Tensor part_by_hand(const at::Tensor& whole, const DeviceMesh& mesh,
                               const Placements& placements) {
  auto part = whole;
  const auto cut = [&](bool is_strided) {
    for (size_t i = 0; i < placements.size(); ++i) {
      if (!placements[i].is_shard() || placements[i].is_strided() != is_strided) continue;
      const auto dim = static_cast<int64_t>(i);
      part = chunk_by_hand(part, placements[i].dim(), mesh.size(dim), mesh.local_rank(dim));
    }
  };
  cut(false);
  cut(true);  // strided shards cut after the others
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_partial()) continue;
    const auto dim = static_cast<int64_t>(i);
    const auto others = static_cast<double>(mesh.size(dim) - 1);
    part = part * (mesh.local_rank(dim) == 0 ? 1.0 + 0.5 * others : -0.5);
  }
  return part.contiguous().clone();
}

/// The whole as a distributed tensor, without communication.
inline DTensor placed(const at::Tensor& whole, const DeviceMesh& mesh,
                      const Placements& placements) {
  return DTensor::from_local(
      part_by_hand(whole, mesh, placements), mesh, placements,
      {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()});
}

inline at::Tensor full_of(const at::Tensor& tensor) {
  return DTensor::of(tensor).full_tensor().detach();
}

/// All combinations of these over the dimensions of a mesh.
inline std::vector<Placements> combinations(const std::vector<Placement>& choices,
                                            size_t mesh_ndim) {
  std::vector<Placements> all{{}};
  for (size_t dim = 0; dim < mesh_ndim; ++dim) {
    std::vector<Placements> longer;
    for (const auto& begun : all) {
      for (const auto& choice : choices) {
        longer.push_back(begun);
        longer.back().push_back(choice);
      }
    }
    all = std::move(longer);
  }
  return all;
}

/// Runs `body` with a mesh of this shape over all ranks, which are threads.
inline void on_mesh(const MeshShape& shape, const std::function<void(const DeviceMesh&)>& body) {
  run_threads(static_cast<int>(c10::multiply_integers(shape)),
              [&] { body(init_device_mesh(torch::kCPU, shape)); },
              {.backend = "shm", .timeout = std::chrono::seconds(20)});
}

/// The same on a device, with ranks as processes; the case says which backend.
inline void on_mesh(DeviceCase where, const MeshShape& shape,
                    const std::function<void(const DeviceMesh&)>& body) {
  where.ranks = static_cast<int>(c10::multiply_integers(shape));
  run_on(where, [&] { body(init_device_mesh(run_device().type(), shape)); });
}

/// Values that tell every element apart, without the generator that threads share.
inline at::Tensor numbered(at::IntArrayRef sizes, c10::Device device = torch::kCPU) {
  const auto count = c10::multiply_integers(sizes);
  return (torch::arange(count, torch::kFloat) * 0.37 - 0.11 * static_cast<double>(count))
      .view(sizes)
      .to(device);
}

}  // namespace tessera::testing
