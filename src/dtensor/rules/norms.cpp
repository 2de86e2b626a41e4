// Normalization within each sample: layer, RMS, group and weight norm. What is normalized together
// stays together.
#include "dtensor/rules/free_dims.h"
#include "dtensor/rules/passages.h"

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
}  // namespace tessera::dtensor
