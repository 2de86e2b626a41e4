#include "fully_shard/by_operators.h"

#include "comm/functional_ops.h"

#include <ATen/ATen.h>

namespace tessera::sharded {
namespace {

/// A rank's part as it travels: as long as the longest.
at::Tensor padded(const at::Tensor& part, const Rows& rows) {
  const auto flat = part.reshape({-1});
  const auto missing = rows.largest_numel() - flat.numel();
  return missing == 0 ? flat : at::constant_pad_nd(flat, {0, missing});
}

at::Tensor whole_of(const at::Tensor& gathered, const Rows& rows) {
  if (rows.is_even()) return gathered.view(rows.sizes());
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < rows.ranks(); ++rank) {
    const auto sizes = rows.part_sizes(rank);
    const auto numel = c10::multiply_integers(sizes);
    if (numel > 0)
      parts.push_back(gathered.narrow(0, rank * rows.largest_numel(), numel).view(sizes));
  }
  return at::cat(parts, rows.tensor_dim());
}

at::Tensor all_parts(const at::Tensor& whole, const Rows& rows) {
  if (rows.is_even()) return whole.reshape({-1});
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < rows.ranks(); ++rank)
    parts.push_back(padded(rows.part(whole, rank), rows));
  return at::cat(parts);
}

}  // namespace

std::vector<at::Tensor> gather_by_operators(const std::vector<at::Tensor>& shards,
                                            const std::vector<Rows>& rows,
                                            const std::vector<at::ScalarType>& dtypes,
                                            const Group& group) {
  std::vector<at::Tensor> wholes(shards.size());
  std::map<at::ScalarType, std::vector<size_t>> kinds;  // a message has one dtype
  for (size_t i = 0; i < shards.size(); ++i) {
    const bool travels = rows[i].is_split() && group->getSize() > 1 && rows[i].numel() > 0;
    if (travels)
      kinds[dtypes[i]].push_back(i);
    else  // an operator in any case, or a recorder would know the memory as the parameter
      wholes[i] =
          shards[i].scalar_type() == dtypes[i] ? at::alias(shards[i]) : shards[i].to(dtypes[i]);
  }
  for (const auto& [dtype, members] : kinds) {
    std::vector<at::Tensor> sent;
    for (const size_t i : members) sent.push_back(padded(shards[i].to(dtype), rows[i]));
    const auto received = comm::functional::wait(comm::functional::all_gather(sent, group));
    for (size_t k = 0; k < members.size(); ++k)
      wholes[members[k]] = whole_of(received[k], rows[members[k]]);
  }
  return wholes;
}

std::vector<at::Tensor> scatter_by_operators(const std::vector<at::Tensor>& tensors,
                                             const std::vector<Rows>& rows,
                                             ReduceOp::RedOpType reduction, const Group& group,
                                             const Group& copies) {
  std::vector<at::Tensor> sent;
  for (size_t i = 0; i < tensors.size(); ++i) sent.push_back(all_parts(tensors[i], rows[i]));
  auto parts = comm::functional::wait(comm::functional::reduce_scatter(sent, reduction, group));
  // As they are, equally long on all ranks: these send the same messages then.
  if (copies)
    parts = comm::functional::wait(comm::functional::all_reduce(parts, reduction, copies));
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto sizes = rows[i].part_sizes(group->getRank());
    parts[i] = parts[i].narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  }
  return parts;
}

}  // namespace tessera::sharded
