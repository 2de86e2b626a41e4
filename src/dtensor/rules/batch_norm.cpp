// Batch norm. Channels are independent of each other; samples only where the statistics are given,
// not taken from the batch.
#include "dtensor/rules/free_dims.h"

namespace tessera::dtensor {
namespace {

constexpr int64_t kChannelDim = 1;

bool takes_statistics_from_batch(const Call& call) {
  for (const auto* name : {"training", "train"}) {
    if (call.has_argument(name)) return call.argument(name).toBool();
  }
  return false;
}

/// Results after the output are vectors of channels; in evaluation the first two are empty.
bool is_vector_of_channels(const Call& call, size_t output) {
  return output > 2 || takes_statistics_from_batch(call);
}

/// (input, weight, bias, running_mean, running_var) -> (output, save_mean, save_invstd, ...)
Rows forward_rows(const Call& call, int64_t) {
  const size_t first = call.output_count();
  Rows rows;
  auto by_channel = call.row();
  for (size_t i = 0; i < first; ++i) {
    if (is_vector_of_channels(call, i)) by_channel[i] = Shard(0);
  }
  std::fill(by_channel.begin() + static_cast<long>(first), by_channel.end(), Shard(0));
  by_channel[0] = by_channel[first] = Shard(kChannelDim);
  rows.emplace_back(std::move(by_channel));
  if (takes_statistics_from_batch(call)) return rows;
  for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim) {
    if (dim == kChannelDim) continue;
    auto row = call.row();
    row[0] = row[first] = Shard(dim);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

std::vector<Sizes> forward_sizes(const Call& call) {
  // What kernels of other devices leave in the results that evaluation does not need is their own.
  if (!takes_statistics_from_batch(call) && !is_on_cpu(call)) return {};
  const auto& sizes = call.operand(0).sizes;
  std::vector<Sizes> results = {sizes};
  for (size_t i = 1; i < call.output_count(); ++i)
    results.push_back({is_vector_of_channels(call, i) ? sizes[kChannelDim] : 0});
  return results;
}

Rule forward_rule(std::vector<size_t> also_writes) {
  Rule rule;
  rule.rows = forward_rows;
  rule.takes_any_indices = true;
  rule.also_writes = std::move(also_writes);
  rule.shapes = forward_sizes;
  return rule;
}

/// Parameters' gradients are sums over the batch.
void place_gradients(const Call& call, std::vector<Placement>& row, const Placement& input,
                     const Placement& parameters) {
  for (size_t i = 0; i < call.output_count(); ++i) {
    const auto& placement = i == 0 ? input : parameters;
    row[i] = is_asked(call, i) ? placement : Replicate();
  }
}

/// (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd)
Rows backward_rows(const Call& call, int64_t) {
  const size_t first = call.output_count();
  Rows rows;
  auto by_channel = call.row();
  place_gradients(call, by_channel, Shard(kChannelDim), Shard(0));
  by_channel[first] = by_channel[first + 1] = Shard(kChannelDim);
  const size_t vectors = takes_statistics_from_batch(call) ? 5 : 3;
  std::fill_n(by_channel.begin() + static_cast<long>(first) + 2, vectors, Shard(0));
  rows.emplace_back(std::move(by_channel));
  if (takes_statistics_from_batch(call)) return rows;
  for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim) {
    if (dim == kChannelDim) continue;
    auto row = call.row();
    place_gradients(call, row, Shard(dim), Partial());
    row[first] = row[first + 1] = Shard(dim);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

std::vector<Sizes> backward_sizes(const Call& call) {
  const auto& sizes = call.operand(1).sizes;
  std::vector<Sizes> results = {sizes, {sizes[kChannelDim]}, {sizes[kChannelDim]}};
  for (size_t i = 0; i < results.size(); ++i) {
    if (!is_asked(call, i)) results[i].clear();
  }
  return results;
}

Rule backward_rule() {
  Rule rule;
  rule.rows = backward_rows;
  rule.takes_any_indices = true;
  rule.shapes = backward_sizes;
  return rule;
}

const Registration kForward({"aten::native_batch_norm"}, forward_rule({3, 4}));
const Registration kLegit({"aten::_native_batch_norm_legit",
                           "aten::_native_batch_norm_legit_no_training",
                           "aten::_native_batch_norm_legit_functional"},
                          forward_rule({}));
const Registration kBackward({"aten::native_batch_norm_backward"}, backward_rule());

}  // namespace
}  // namespace tessera::dtensor
