#include "compiler/spmd/move_rows.h"

#include "comm/functional_ops.h"
#include "dtensor/comm_count.h"
#include "dtensor/sharding.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

std::vector<dtensor::Chunk> intervals(const std::vector<int64_t>& lengths) {
  std::vector<dtensor::Chunk> found;
  int64_t offset = 0;
  for (const auto length : lengths) {
    found.push_back({offset, length});
    offset += length;
  }
  return found;
}

int64_t overlap(const dtensor::Chunk& one, const dtensor::Chunk& other) {
  const auto end = std::min(one.offset + one.length, other.offset + other.length);
  return std::max<int64_t>(end - std::max(one.offset, other.offset), 0);
}

}  // namespace

std::vector<int64_t> chunk_lengths(int64_t size, int64_t ranks) {
  std::vector<int64_t> lengths;
  for (int64_t rank = 0; rank < ranks; ++rank)
    lengths.push_back(dtensor::chunk_of(size, ranks, rank).length);
  return lengths;
}

at::Tensor move_rows(const at::Tensor& local, int64_t tensor_dim, const std::vector<int64_t>& from,
                     const std::vector<int64_t>& to, const Group& group) {
  if (from == to) return local;
  const auto mine = static_cast<size_t>(group->getRank());
  const auto before = intervals(from), after = intervals(to);
  const auto rows = local.movedim(tensor_dim, 0).contiguous();
  auto sizes = rows.sizes().vec();
  sizes[0] = 1;
  const int64_t row = c10::multiply_integers(sizes);
  std::vector<int64_t> sent, received;
  for (size_t rank = 0; rank < from.size(); ++rank) {
    sent.push_back(overlap(before[mine], after[rank]) * row);
    received.push_back(overlap(before[rank], after[mine]) * row);
  }
  sizes[0] = to[mine];
  dtensor::count_collective("all_to_all", rows.nbytes());
  const auto pending = comm::functional::all_to_all(rows.view({-1}), received, sent, group);
  return comm::functional::wait(pending).view(sizes).movedim(0, tensor_dim);
}

}  // namespace tessera::compiler
