// Batch norm. Channels are independent of each other; samples only where the statistics are given,
// not taken from the batch.
#include "dtensor/rules/free_dims.h"

#include <ATen/ops/empty.h>

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
Rows batch_norm_rows(const Call& call, int64_t) {
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

std::vector<Sizes> batch_norm_sizes(const Call& call) {
  // What kernels of other devices leave in the results that evaluation does not need is their own.
  if (!takes_statistics_from_batch(call) && !is_on_cpu(call)) return {};
  const auto& sizes = call.operand(0).sizes;
  std::vector<Sizes> results = {sizes};
  for (size_t i = 1; i < call.output_count(); ++i)
    results.push_back({is_vector_of_channels(call, i) ? sizes[kChannelDim] : 0});
  return results;
}

Rule batch_norm_rule(std::vector<size_t> also_writes) {
  Rule rule;
  rule.rows = batch_norm_rows;
  rule.takes_any_indices = true;
  rule.also_writes = std::move(also_writes);
  rule.shapes = batch_norm_sizes;
  return rule;
}

/// (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd)
Rows batch_norm_backward_rows(const Call& call, int64_t) {
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
    place_gradients(call, row, Shard(dim), Partial());  // of parameters: sums over the batch
    row[first] = row[first + 1] = Shard(dim);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

std::vector<Sizes> batch_norm_backward_sizes(const Call& call) {
  const auto& sizes = call.operand(1).sizes;
  std::vector<Sizes> results = {sizes, {sizes[kChannelDim]}, {sizes[kChannelDim]}};
  for (size_t i = 0; i < results.size(); ++i) {
    if (!is_asked(call, i)) results[i].clear();
  }
  return results;
}

Rule batch_norm_backward_rule() {
  Rule rule;
  rule.rows = batch_norm_backward_rows;
  rule.takes_any_indices = true;
  rule.shapes = batch_norm_backward_sizes;
  return rule;
}

/// Note [batch norm of cuDNN]
/// Beside what native_batch_norm returns, it hands its backward a buffer whose size and contents
/// are cuDNN's own. So parts are computed by the native kernels, and the buffer is empty.
constexpr size_t kBuffer = 3;

c10::OperatorHandle native_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

Rows cudnn_rows(const Call& call, int64_t ranks) {
  auto rows = batch_norm_rows(call, ranks);
  for (auto& row : rows) row.placements[kBuffer] = Replicate();
  return rows;
}

std::vector<Sizes> cudnn_sizes(const Call& call) {
  const auto& sizes = call.operand(0).sizes;
  const Sizes statistics = {takes_statistics_from_batch(call) ? sizes[kChannelDim] : 0};
  return {sizes, statistics, statistics, {0}};
}

void run_cudnn_batch_norm(const c10::OperatorHandle&, const Choice&, const std::vector<Sizes>&,
                          torch::jit::Stack& stack) {
  static const auto kNative = native_operator("aten::native_batch_norm");
  const auto options = stack[0].toTensor().options();
  const bool is_training = stack[5].toBool();
  kNative.callBoxed(stack);
  if (!is_training) stack[1] = stack[2] = at::empty({0}, stack[1].toTensor().options());
  stack.emplace_back(at::empty({0}, options.dtype(at::kByte)));
}

Rule cudnn_rule() {
  auto rule = batch_norm_rule({3, 4});
  rule.rows = cudnn_rows;
  rule.shapes = cudnn_sizes;
  rule.run = run_cudnn_batch_norm;
  return rule;
}

/// (input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, buffer)
void run_cudnn_backward(const c10::OperatorHandle&, const Choice&, const std::vector<Sizes>&,
                        torch::jit::Stack& stack) {
  static const auto kNative = native_operator("aten::native_batch_norm_backward");
  std::swap(stack[0], stack[1]);
  stack.insert(stack.begin() + 7, /*train=*/true);
  stack.back() = c10::List<bool>({true, true, true});  // output_mask, in the buffer's place
  kNative.callBoxed(stack);
}

Rule cudnn_backward_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) {
    auto row = call.row();
    std::fill(row.begin(), row.end() - 1, Shard(0));  // all but the buffer
    row[0] = row[3] = row[4] = Shard(kChannelDim);
    return Rows{Row(std::move(row))};
  };
  rule.takes_any_indices = true;
  rule.run = run_cudnn_backward;
  rule.shapes = [](const Call& call) {
    const auto& sizes = call.operand(0).sizes;
    return std::vector<Sizes>{sizes, {sizes[kChannelDim]}, {sizes[kChannelDim]}};
  };
  return rule;
}

const Registration kBatchNorm({"aten::native_batch_norm"}, batch_norm_rule({3, 4}));
const Registration kLegit({"aten::_native_batch_norm_legit",
                           "aten::_native_batch_norm_legit_no_training",
                           "aten::_native_batch_norm_legit_functional"},
                          batch_norm_rule({}));
const Registration kBatchNormBackward({"aten::native_batch_norm_backward"},
                                      batch_norm_backward_rule());
const Registration kCudnn({"aten::cudnn_batch_norm"}, cudnn_rule());
const Registration kCudnnBackward({"aten::cudnn_batch_norm_backward"}, cudnn_backward_rule());

}  // namespace
}  // namespace tessera::dtensor
