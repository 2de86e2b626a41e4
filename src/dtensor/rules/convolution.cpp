// Convolutions, by samples and by channels. Contributions of input channels are pending sums.
#include "dtensor/rules/common_rules.h"

namespace tessera::dtensor {
namespace {

/// Where the channels are in a weight: [out, in / groups, ...], or [in, out / groups, ...] if the
/// convolution is transposed.
struct Channels {
  explicit Channels(const Call& call)
      : out(call.argument("transposed").toBool() ? 1 : 0), in(1 - out) {}

  int64_t out;
  int64_t in;
};

bool is_grouped(const Call& call) { return call.argument("groups").toInt() != 1; }

/// Whether whole groups fall to every rank.
bool groups_divide(const Call& call) {
  return call.argument("groups").toInt() % mesh_ranks(call) == 0;
}

/// (input, weight, bias) -> output
Rows convolution_rows(const Call& call, int64_t) {
  Rows rows = {{Shard(0), Shard(0), Replicate(), Replicate()}};
  if (is_grouped(call)) {
    // Groups come first in dim 0 of either kind of weight.
    if (groups_divide(call)) {
      rows.emplace_back(std::vector{Shard(1), Shard(1), Shard(0), Shard(0)},
                        /*even=*/true);
    }
  } else {
    const Channels channels(call);
    rows.push_back({Shard(1), Replicate(), Shard(channels.out), Shard(0)});
    rows.push_back({Partial(), Shard(1), Shard(channels.in), Partial()});
  }
  rows.push_back({Partial(), Partial(), Replicate(), Partial()});
  rows.push_back({Partial(), Replicate(), Partial(), Partial()});
  return rows;
}

/// (grad_output, input, weight) -> (grad_input, grad_weight, grad_bias)
Rows convolution_backward_rows(const Call& call, int64_t) {
  Rows rows = {{Shard(0), Partial(), Partial(), Shard(0), Shard(0), Replicate()}};
  if (is_grouped(call)) {
    if (groups_divide(call)) {
      rows.emplace_back(std::vector{Shard(1), Shard(0), Shard(0), Shard(1), Shard(1), Shard(0)},
                        /*even=*/true);
    }
  } else {
    const auto out = Shard(Channels(call).out);
    const auto in = Shard(Channels(call).in);
    rows.push_back({Partial(), out, Shard(0), Shard(1), Replicate(), out});
    rows.push_back({Shard(1), in, Replicate(), Replicate(), Shard(1), in});
  }
  rows.push_back({Partial(), Partial(), Partial(), Partial(), Replicate(), Replicate()});
  for (auto& row : rows) {
    for (size_t i = 0; i < call.output_count(); ++i) {
      if (!is_asked(call, i)) row.placements[i] = Replicate();
    }
  }
  return rows;
}

/// Groups are cut where the channels of `input` and of the weight both are.
void adapt_groups(const Call& call, const Choice& choice, size_t input, LocalArguments& local) {
  if (!is_grouped(call)) return;
  const auto& sizes = call.operand(input).sizes;
  const auto own = own_sizes(choice, sizes, choice.inputs[input]);
  if (own[1] != sizes[1])
    local.set(call.index_of("groups"), call.argument("groups").toInt() * own[1] / sizes[1]);
}

void adapt_forward(const Call& call, const Choice& choice, LocalArguments& local) {
  adapt_groups(call, choice, 0, local);
}

void adapt_backward(const Call& call, const Choice& choice, LocalArguments& local) {
  adapt_groups(call, choice, 1, local);
  if (!is_asked(call, 2) || call.argument("bias_sizes").isNone()) return;
  const auto own = own_sizes(choice, call.operand(0).sizes, choice.inputs[0]);
  local.set(call.index_of("bias_sizes"), std::vector<int64_t>{own[1]});
}

std::vector<Sizes> convolution_sizes(const Call& call) {
  const auto& input = call.operand(0).sizes;
  const auto& weight = call.operand(1).sizes;
  if (input.size() != weight.size()) return {};
  const auto stride = call.argument("stride").toIntVector();
  const auto padding = call.argument("padding").toIntVector();
  const auto dilation = call.argument("dilation").toIntVector();
  const auto output_padding = call.argument("output_padding").toIntVector();
  const bool is_transposed = call.argument("transposed").toBool();
  const auto at = [](const std::vector<int64_t>& values, size_t i) {
    return values.size() == 1 ? values[0] : values[i];
  };
  Sizes sizes = {input[0], is_transposed ? weight[1] * call.argument("groups").toInt() : weight[0]};
  for (size_t i = 0; i + 2 < input.size(); ++i) {
    const int64_t reach = at(dilation, i) * (weight[i + 2] - 1);
    const int64_t length = input[i + 2];
    sizes.push_back(is_transposed ? (length - 1) * at(stride, i) - 2 * at(padding, i) + reach +
                                        at(output_padding, i) + 1
                                  : (length + 2 * at(padding, i) - reach - 1) / at(stride, i) + 1);
  }
  return {sizes};
}

std::vector<Sizes> convolution_backward_sizes(const Call& call) {
  std::vector<Sizes> sizes = {
      call.operand(1).sizes, call.operand(2).sizes, {call.operand(0).sizes[1]}};
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!is_asked(call, i)) sizes[i].clear();
  }
  return sizes;
}

Rule convolution_rule(Rows (*rows)(const Call&, int64_t), Adapt adapt, FindShapes shapes) {
  Rule rule;
  rule.rows = rows;
  rule.adapt = std::move(adapt);
  rule.shapes = std::move(shapes);
  return rule;
}

const Registration kConvolution({"aten::convolution", "aten::_convolution"},
                                convolution_rule(convolution_rows, adapt_forward,
                                                 convolution_sizes));
const Registration kConvolutionBackward({"aten::convolution_backward"},
                                        convolution_rule(convolution_backward_rows, adapt_backward,
                                                         convolution_backward_sizes));

}  // namespace
}  // namespace tessera::dtensor
