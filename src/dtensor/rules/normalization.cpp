// Normalization within each sample: layer, RMS, group and weight norm. What is normalized together
// stays together.
#include "dtensor/rules/common_rules.h"

#include <ATen/ops/empty.h>

namespace tessera::dtensor {
namespace {

/// Dimensions before those that are normalized.
int64_t outer_ndim(const Call& call, const Operand& input) {
  return input.ndim() - static_cast<int64_t>(call.argument("normalized_shape").toListRef().size());
}

/// Of the mean of every normalized slice.
Sizes statistics_sizes(const Call& call) {
  auto sizes = call.operand(0).sizes;
  std::fill(sizes.begin() + outer_ndim(call, call.operand(0)), sizes.end(), 1);
  return sizes;
}

/// (input, weight, bias) -> (output, mean, rstd); root mean squares have neither bias nor mean.
Rule layer_norm_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) {
    Rows rows;
    for (int64_t dim = 0; dim < outer_ndim(call, call.operand(0)); ++dim) {
      auto row = call.row(Shard(dim));
      row[call.output_count()] = Shard(dim);
      rows.emplace_back(std::move(row));
    }
    return rows;
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.shapes = [](const Call& call) {
    std::vector<Sizes> sizes(call.output_count(), statistics_sizes(call));
    sizes[0] = call.operand(0).sizes;
    return sizes;
  };
  return rule;
}

/// (grad_out, input, statistics..., parameters...) -> (grad_input, grads of parameters...)
Rule layer_norm_backward_rule(size_t statistics) {
  Rule rule;
  rule.rows = [statistics](const Call& call, int64_t) {
    Rows rows;
    for (int64_t dim = 0; dim < outer_ndim(call, call.operand(1)); ++dim) {
      auto row = call.row();
      place_gradients(call, row, Shard(dim), Partial());
      for (size_t i = 0; i < 2 + statistics; ++i) row[call.output_count() + i] = Shard(dim);
      rows.emplace_back(std::move(row));
    }
    auto row = call.row();
    place_gradients(call, row, Partial(), Partial());
    row[call.output_count()] = Partial();
    rows.emplace_back(std::move(row));
    return rows;
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.shapes = [](const Call& call) {
    const auto normalized = call.argument("normalized_shape").toIntVector();
    std::vector<Sizes> sizes;
    for (size_t i = 0; i < call.output_count(); ++i)
      sizes.push_back(!is_asked(call, i) ? Sizes() : i == 0 ? call.operand(1).sizes : normalized);
    return sizes;
  };
  return rule;
}

const Registration kLayerNorm({"aten::native_layer_norm", "aten::_fused_rms_norm"},
                              layer_norm_rule());
const Registration kLayerNormBackward({"aten::native_layer_norm_backward"},
                                      layer_norm_backward_rule(2));
const Registration kRmsNormBackward({"aten::_fused_rms_norm_backward"},
                                    layer_norm_backward_rule(1));

/// Whether whole groups of channels fall to every rank.
bool norm_groups_divide(const Call& call) {
  return call.argument("group").toInt() % mesh_ranks(call) == 0;
}

/// Puts this rank's samples, channels and groups in place of all; the tensor argument `input` is
/// [N, C, ...].
Adapt with_own_groups(size_t input) {
  return [input](const Call& call, const Choice& choice, LocalArguments& local) {
    const auto& sizes = call.operand(input).sizes;
    const auto own = own_sizes(choice, sizes, choice.inputs[input]);
    local.set(call.index_of("N"), own[0]);
    local.set(call.index_of("C"), own[1]);
    local.set(call.index_of("group"), call.argument("group").toInt() * own[1] / sizes[1]);
  };
}

/// (input, weight, bias) -> (output, mean [N, group], rstd [N, group])
Rule group_norm_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) {
    Rows rows = {{Shard(0), Shard(0), Shard(0), Shard(0), Replicate(), Replicate()}};
    if (norm_groups_divide(call)) {
      rows.emplace_back(std::vector{Shard(1), Shard(1), Shard(1), Shard(1), Shard(0), Shard(0)},
                        /*even=*/true);
    }
    return rows;
  };
  rule.adapt = with_own_groups(0);
  rule.prepare = make_contiguous;
  rule.shapes = [](const Call& call) {
    const auto& sizes = call.operand(0).sizes;
    const Sizes statistics = {call.argument("N").toInt(), call.argument("group").toInt()};
    return std::vector<Sizes>{sizes, statistics, statistics};
  };
  return rule;
}

/// (grad_out, input, mean, rstd, weight) -> (grad_input, grad_weight, grad_bias)
Rule group_norm_backward_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) {
    const size_t first = call.output_count();
    auto by_sample = call.row();
    place_gradients(call, by_sample, Shard(0), Partial());
    std::fill_n(by_sample.begin() + static_cast<long>(first), 4, Shard(0));
    Rows rows = {Row(std::move(by_sample))};
    if (!norm_groups_divide(call)) return rows;
    auto by_group = call.row();
    place_gradients(call, by_group, Shard(1), Shard(0));
    std::fill_n(by_group.begin() + static_cast<long>(first), 4, Shard(1));
    by_group[first + 4] = Shard(0);
    rows.emplace_back(std::move(by_group), /*even=*/true);
    return rows;
  };
  rule.adapt = with_own_groups(1);
  rule.prepare = make_contiguous;
  rule.shapes = [](const Call& call) {
    const Sizes channels = {call.argument("C").toInt()};
    std::vector<Sizes> sizes = {call.operand(1).sizes, channels, channels};
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (!is_asked(call, i)) sizes[i].clear();
    }
    return sizes;
  };
  return rule;
}

const Registration kGroupNorm({"aten::native_group_norm"}, group_norm_rule());
const Registration kGroupNormBackward({"aten::native_group_norm_backward"},
                                      group_norm_backward_rule());

/// Each slice along `dim` has a norm of its own.
std::vector<int64_t> dim_itself(const Call& call) {
  return {call.dim("dim", call.operand(0).ndim())};
}
Rule weight_norm_rule(FindShapes shapes) {
  auto rule = alike_rule(dim_itself, std::move(shapes));
  rule.prepare = make_contiguous;
  return rule;
}
const Registration kWeightNorm({"aten::_weight_norm_interface"},
                               weight_norm_rule(sizes_of({0, 1})));
const Registration kWeightNormBackward({"aten::_weight_norm_interface_backward"},
                                       weight_norm_rule(sizes_of({1, 2})));
const Registration kRenorm({"aten::renorm"}, alike_rule(dim_itself, sizes_of({0})));

}  // namespace

// Batch norm. Channels are independent of each other; samples only where the statistics are given,
// not taken from the batch.

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

// Softmax: the dimension that is normalized stays whole. And log-sigmoid, its kin.

namespace {

Rule softmax_rule(size_t result_like, FreeDims dims = dims_beside("dim")) {
  auto rule = alike_rule(std::move(dims), sizes_of({result_like}));
  rule.takes_empty_shards = true;
  return rule;
}

const Registration kSoftmax({"aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax"},
                            softmax_rule(0));
const Registration kSoftmaxBackward({"aten::_softmax_backward_data",
                                     "aten::_log_softmax_backward_data"},
                                    softmax_rule(1));

/// A missing `dim` means the last; a mask of one or two dimensions in another order has no rows.
std::vector<int64_t> unmasked_dims(const Call& call) {
  const size_t mask = call.input_count() - 1;
  if (call.operand(mask).sizes != call.operand(0).sizes) return {};
  const bool is_generic = !call.has_argument("mask_type") || call.argument("mask_type").isNone() ||
                          call.argument("mask_type").toInt() == 2;
  if (!is_generic) return {};
  return call.argument("dim").isNone() ? leading_dims(1)(call) : dims_beside("dim")(call);
}
const Registration kMasked({"aten::_masked_softmax", "aten::_masked_softmax_backward"},
                           alike_rule(unmasked_dims, sizes_of({0})));

/// input -> (output, buffer). The buffer is as large as the input or, on other devices than the
/// CPU, empty.
Rule log_sigmoid_rule() {
  auto rule = softmax_rule(0, leading_dims(0));
  rule.rows = [alike = rule.rows](const Call& call, int64_t ranks) {
    auto rows = alike(call, ranks);
    for (auto& row : rows) {
      if (!is_on_cpu(call)) row.placements[1] = Replicate();
    }
    return rows;
  };
  rule.shapes = [](const Call& call) {
    const auto& sizes = call.operand(0).sizes;
    return std::vector<Sizes>{sizes, is_on_cpu(call) ? sizes : Sizes{0}};
  };
  return rule;
}
const Registration kLogSigmoid({"aten::log_sigmoid_forward"}, log_sigmoid_rule());

}  // namespace
}  // namespace tessera::dtensor
