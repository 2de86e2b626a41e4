#include "replicate/sparse.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::replication {
namespace {

/// Rows of every rank, stacked along the last dimension of indices or the first of values; ranks
/// may have different numbers of them.
std::vector<at::Tensor> gather_padded(const at::Tensor& rows, const std::vector<int64_t>& counts,
                                      const Group& group) {
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  auto shape = rows.sizes().vec();
  shape[0] = most;
  auto padded = at::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  const auto all = all_gather(padded, 0, group);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < counts.size(); ++rank)
    parts.push_back(all.narrow(0, static_cast<int64_t>(rank) * most, counts[rank]));
  return parts;
}

}  // namespace

at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter,
                          const Group& group) {
  const int sparse_dims = 1;  // an embedding's rows
  const bool is_sparse = gradient.defined() && gradient.is_sparse();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_sparse || gradient.sparse_dim() == sparse_dims,
      "replicate: expected sparse gradients with one sparse dimension, got ",
      is_sparse ? gradient.sparse_dim() : 0);
  const auto coalesced = is_sparse ? gradient.coalesce() : at::Tensor();
  auto value_shape = parameter.sizes().vec();
  value_shape[0] = 0;
  const auto indices =
      is_sparse ? coalesced.indices().squeeze(0).contiguous()
                : at::zeros({0}, parameter.options().dtype(at::kLong).requires_grad(false));
  const auto values = is_sparse ? coalesced.values().contiguous()
                                : at::zeros(value_shape, parameter.options().requires_grad(false));
  const auto count = at::full({1}, indices.size(0), indices.options());
  const auto gathered_counts = all_gather(count, 0, group).cpu();
  const std::vector<int64_t> counts(
      gathered_counts.const_data_ptr<int64_t>(),
      gathered_counts.const_data_ptr<int64_t>() + gathered_counts.numel());
  const auto all_indices = at::cat(gather_padded(indices, counts, group));
  const auto all_values = at::cat(gather_padded(values, counts, group));
  return at::_sparse_coo_tensor_unsafe(all_indices.unsqueeze(0),
                                       all_values / static_cast<double>(counts.size()),
                                       parameter.sizes())
      .coalesce();
}

}  // namespace tessera::replication
