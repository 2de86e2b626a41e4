#include "dtensor/sharding.h"

#include <tessera/dtensor/placement.h>

#include "comm/type_names.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

namespace tessera {
namespace {

constexpr std::array kPartialOps = {ReduceOp::SUM, ReduceOp::AVG,     ReduceOp::MIN,
                                    ReduceOp::MAX, ReduceOp::PRODUCT, ReduceOp::BAND,
                                    ReduceOp::BOR, ReduceOp::BXOR};

}  // namespace

Placement Shard(int64_t tensor_dim) { return StridedShard(tensor_dim, 1); }

Placement StridedShard(int64_t tensor_dim, int64_t split_factor) {
  TORCH_CHECK_VALUE(std::abs(tensor_dim) <= std::numeric_limits<int16_t>::max(),
                    "Shard: expected a tensor dimension, got ", tensor_dim);
  TORCH_CHECK_VALUE(split_factor >= 1 && split_factor <= std::numeric_limits<int32_t>::max(),
                    "StridedShard: expected a split factor of at least 1, got ", split_factor);
  Placement placement;
  placement.kind_ = Placement::Kind::Shard;
  placement.dim_ = static_cast<int16_t>(tensor_dim);
  placement.split_factor_ = static_cast<int32_t>(split_factor);
  return placement;
}

Placement Partial(ReduceOp::RedOpType op) {
  TORCH_CHECK_VALUE(std::find(kPartialOps.begin(), kPartialOps.end(), op) != kPartialOps.end(),
                    "Partial: expected SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR, got ",
                    static_cast<int>(op));
  Placement placement;
  placement.kind_ = Placement::Kind::Partial;
  placement.reduce_op_ = op;
  return placement;
}

Placement Partial(std::string_view op) {
  for (const auto known : kPartialOps) {
    if (comm::name_of_reduce(known) == op) return Partial(known);
  }
  TORCH_CHECK_VALUE(
      false, "Partial: expected sum, avg, min, max, product, band, bor or bxor, got '", op, "'");
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  switch (placement.kind()) {
    case Placement::Kind::Replicate:
      return out << "Replicate()";
    case Placement::Kind::Partial:
      return out << "Partial(" << comm::name_of_reduce(placement.reduce_op()) << ')';
    case Placement::Kind::Shard:
      break;
  }
  if (!placement.is_strided()) return out << "Shard(" << placement.dim() << ')';
  return out << "StridedShard(" << placement.dim() << ", " << placement.split_factor() << ')';
}

std::ostream& operator<<(std::ostream& out, const Placements& placements) {
  out << '[';
  for (size_t i = 0; i < placements.size(); ++i) out << (i == 0 ? "" : ", ") << placements[i];
  return out << ']';
}

}  // namespace tessera

namespace tessera::dtensor {

Chunk chunk_of(int64_t size, int64_t ranks, int64_t rank) {
  const int64_t each = (size + ranks - 1) / ranks;
  const int64_t begin = std::min(size, each * rank);
  return {begin, std::min(size, begin + each) - begin};
}

std::vector<size_t> shard_order(const Placements& placements, c10::IntArrayRef mesh_shape,
                                int64_t tensor_dim) {
  std::vector<size_t> order;
  for (size_t mesh_dim = placements.size(); mesh_dim-- > 0;) {
    if (!placements[mesh_dim].is_shard(tensor_dim)) continue;
    auto place = order.begin();
    for (int64_t pieces = 1; pieces < placements[mesh_dim].split_factor() && place != order.end();
         ++place)
      pieces *= mesh_shape[*place];
    order.insert(place, mesh_dim);
  }
  return order;
}

Placement shard_last(const Placements& placements, c10::IntArrayRef mesh_shape, size_t mesh_dim,
                     int64_t tensor_dim) {
  int64_t pieces = 1;
  for (size_t right = mesh_dim + 1; right < placements.size(); ++right) {
    if (placements[right].is_shard(tensor_dim)) pieces *= mesh_shape[right];
  }
  return StridedShard(tensor_dim, pieces);
}

Placements canonical(const Placements& placements, c10::IntArrayRef mesh_shape) {
  auto result = placements;
  for (size_t mesh_dim = 0; mesh_dim < placements.size(); ++mesh_dim) {
    if (!placements[mesh_dim].is_strided()) continue;
    int64_t pieces = 1;
    for (const size_t before : shard_order(placements, mesh_shape, placements[mesh_dim].dim())) {
      if (before == mesh_dim) break;
      if (before > mesh_dim) pieces *= mesh_shape[before];
    }
    result[mesh_dim] = StridedShard(placements[mesh_dim].dim(), pieces);
  }
  return result;
}

Chunk local_chunk(int64_t size, int64_t tensor_dim, const Placements& placements,
                  c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate) {
  Chunk chunk{0, size};
  for (const size_t mesh_dim : shard_order(placements, mesh_shape, tensor_dim)) {
    const auto part = chunk_of(chunk.length, mesh_shape[mesh_dim], coordinate[mesh_dim]);
    chunk = {chunk.offset + part.offset, part.length};
  }
  return chunk;
}

std::vector<Chunk> local_box(c10::IntArrayRef sizes, const Placements& placements,
                             c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate) {
  std::vector<Chunk> box;
  box.reserve(sizes.size());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    box.push_back(
        local_chunk(sizes[dim], static_cast<int64_t>(dim), placements, mesh_shape, coordinate));
  }
  return box;
}

Sizes local_sizes(c10::IntArrayRef sizes, const Placements& placements, c10::IntArrayRef mesh_shape,
                  c10::IntArrayRef coordinate) {
  auto local = sizes.vec();
  for (size_t dim = 0; dim < local.size(); ++dim) {
    const auto tensor_dim = static_cast<int64_t>(dim);
    const bool is_cut =
        std::any_of(placements.begin(), placements.end(),
                    [&](const auto& placement) { return placement.is_shard(tensor_dim); });
    if (is_cut)
      local[dim] = local_chunk(sizes[dim], tensor_dim, placements, mesh_shape, coordinate).length;
  }
  return local;
}

Sizes global_sizes_of_even(c10::IntArrayRef part, const Placements& placements,
                           c10::IntArrayRef mesh_shape) {
  auto sizes = part.vec();
  for (size_t dim = 0; dim < placements.size(); ++dim) {
    if (placements[dim].is_shard()) sizes[placements[dim].dim()] *= mesh_shape[dim];
  }
  return sizes;
}

bool is_even(c10::IntArrayRef sizes, const Placements& placements, c10::IntArrayRef mesh_shape) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    int64_t pieces = 1;
    for (size_t mesh_dim = 0; mesh_dim < placements.size(); ++mesh_dim) {
      if (placements[mesh_dim].is_shard(static_cast<int64_t>(dim))) pieces *= mesh_shape[mesh_dim];
    }
    if (sizes[dim] % pieces != 0) return false;
  }
  return true;
}

bool has_empty_shard(c10::IntArrayRef sizes, const Placements& placements,
                     c10::IntArrayRef mesh_shape) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto tensor_dim = static_cast<int64_t>(dim);
    if (shard_order(placements, mesh_shape, tensor_dim).empty()) continue;
    // Cut twice, the last rank need not hold least: 7 over 2 x 3 is 2, 2, 0 and 1, 1, 1.
    for (const auto& coordinate : coordinates_of(mesh_shape)) {
      if (local_chunk(sizes[dim], tensor_dim, placements, mesh_shape, coordinate).length == 0)
        return true;
    }
  }
  return false;
}

Sizes dense_strides_like(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<size_t> outermost_first(sizes.size());
  std::iota(outermost_first.begin(), outermost_first.end(), 0);
  std::stable_sort(outermost_first.begin(), outermost_first.end(),
                   [&](size_t left, size_t right) { return strides[left] > strides[right]; });
  Sizes dense(sizes.size());
  int64_t stride = 1;
  for (size_t i = outermost_first.size(); i-- > 0;) {
    const size_t dim = outermost_first[i];
    dense[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return dense;
}

std::vector<std::vector<int64_t>> coordinates_of(c10::IntArrayRef mesh_shape) {
  std::vector<std::vector<int64_t>> all = {{}};
  for (const auto ranks : mesh_shape) {
    std::vector<std::vector<int64_t>> longer;
    for (const auto& coordinate : all) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        longer.push_back(coordinate);
        longer.back().push_back(rank);
      }
    }
    all = std::move(longer);
  }
  return all;
}

bool is_one_kind(const Placements& placements) {
  std::optional<ReduceOp::RedOpType> op;
  for (const auto& placement : placements) {
    if (!placement.is_partial()) continue;
    const auto kind =
        placement.reduce_op() == ReduceOp::AVG ? ReduceOp::SUM : placement.reduce_op();
    if (op && *op != kind) return false;
    op = kind;
  }
  return true;
}

Placements normalize(const char* caller, Placements placements, int64_t ndim, int64_t mesh_ndim) {
  if (placements.empty()) placements.resize(mesh_ndim);
  TORCH_CHECK_VALUE(static_cast<int64_t>(placements.size()) == mesh_ndim, caller,
                    ": expected one placement per mesh dimension, ", mesh_ndim, ", got ",
                    placements.size(), ": ", c10::str(placements));
  for (auto& placement : placements) {
    if (placement.is_shard()) {
      TORCH_CHECK_VALUE(placement.dim() >= -ndim && placement.dim() < ndim, caller,
                        ": expected a shard of one of the tensor's ", ndim, " dimensions, got ",
                        c10::str(placement));
      if (placement.dim() < 0)
        placement = StridedShard(placement.dim() + ndim, placement.split_factor());
    }
  }
  TORCH_CHECK_VALUE(is_one_kind(placements), caller,
                    ": expected Partial placements of one operation, got ", c10::str(placements));
  return placements;
}

}  // namespace tessera::dtensor
