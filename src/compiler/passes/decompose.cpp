#include "compiler/ir/operators.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/row_builder.h"
#include "nn/row_kernels.h"

#include <c10/util/StringUtil.h>

#include <limits>
#include <unordered_map>

namespace tessera::compiler {
namespace {

// Note [decompositions]
// Norms, softmax and the losses over it become what they are made of, pointwise operators and
// reductions of rows and columns, where kernels of ours hold these: then residual additions, casts
// and biases' gradients join them, and what lies between is never in memory. 16 bits are computed
// in float throughout. What backward needs again and one subtraction makes, log-probabilities of
// what was given, is computed again.

class Decomposer : public RowBuilder {
 public:
  using RowBuilder::RowBuilder;

 private:
  using Rule = bool (Decomposer::*)(const Node&);

  bool decompose(const Node& node) override {
    static const std::unordered_map<std::string, Rule> rules = {
        {"aten::native_layer_norm", &Decomposer::layer_norm},
        {"aten::native_layer_norm_backward", &Decomposer::layer_norm_backward},
        {"aten::_fused_rms_norm", &Decomposer::rms_norm},
        {"aten::_fused_rms_norm_backward", &Decomposer::rms_norm_backward},
        {"aten::_softmax", &Decomposer::softmax},
        {"aten::_softmax_backward_data", &Decomposer::softmax_backward},
        {"aten::_log_softmax", &Decomposer::log_softmax},
        {"aten::_log_softmax_backward_data", &Decomposer::log_softmax_backward},
        {"aten::nll_loss_forward", &Decomposer::nll_loss},
        {"aten::nll_loss_backward", &Decomposer::nll_loss_backward},
        {nn::detail::kCrossEntropyRows, &Decomposer::cross_entropy_rows},
        {"aten::sum.dim_IntList", &Decomposer::sum},
        {"aten::mm.dtype", &Decomposer::product_with_ones},
    };
    const auto rule = rules.find(node.op);
    return rule != rules.end() && (this->*rule->second)(node);
  }

  bool is_last_dim(ValueId value, const c10::IValue& dim) const {
    const auto rank = static_cast<int64_t>(type(value).sizes.size());
    return dim.toInt() == -1 || dim.toInt() == rank - 1;
  }
  /// Whether results but the first are one number per row.
  bool are_per_row(const Node& node, const std::vector<int64_t>& sizes) const {
    for (size_t i = 1; i < node.results.size(); ++i) {
      const ValueId value = result_at(node, i);
      if (value != kNoValue && type(value).sizes != row_shape(sizes)) return false;
    }
    return true;
  }
  /// Whether the norm is over the last dimension alone.
  static bool is_norm_of_row(const c10::IValue& normalized_shape) {
    return normalized_shape.toIntVector().size() == 1;
  }

  bool layer_norm(const Node& node) {
    const ValueId input = value_at(node, 0), weight = value_at(node, 2), bias = value_at(node, 3);
    if (!has_rows(input) || !is_norm_of_row(node.arguments[1].constant) || !are_plain(node))
      return false;
    if (!are_per_row(node, type(input).sizes)) return false;
    device_ = type(input).device;
    const ValueId x = wide(input);
    const ValueId average = mean(x);
    const ValueId centred = sub(x, average);
    const ValueId variance = mean(mul(centred, centred));
    const ValueId rstd =
        unary("aten::rsqrt", binary("aten::add.Scalar", variance, node.arguments[4]));
    ValueId y = mul(centred, rstd);
    if (weight != kNoValue) y = mul(y, weight);
    if (bias != kNoValue) y = add(y, bias);
    become(result_at(node, 0), y);
    become(result_at(node, 1), average);
    become(result_at(node, 2), rstd);
    return true;
  }

  bool layer_norm_backward(const Node& node) {
    return norm_backward(node, value_at(node, 3), value_at(node, 4), value_at(node, 5));
  }
  bool rms_norm_backward(const Node& node) {
    return norm_backward(node, kNoValue, value_at(node, 3), value_at(node, 4));
  }
  /// Without an `average`, the norm has not taken it away, and has no bias.
  bool norm_backward(const Node& node, ValueId average, ValueId rstd, ValueId weight) {
    const ValueId gradient = value_at(node, 0), input = value_at(node, 1);
    if (!has_rows(input) || !has_rows(gradient) || !are_plain(node)) return false;
    if (!is_norm_of_row(node.arguments[2].constant)) return false;
    device_ = type(input).device;
    const ValueId g = wide(gradient);
    const bool is_centred = average != kNoValue;
    const ValueId normed = mul(is_centred ? sub(wide(input), average) : wide(input), rstd);
    const ValueId weighted = weight == kNoValue ? g : mul(g, weight);
    if (result_at(node, 0) != kNoValue) {
      const ValueId along = mul(normed, mean(mul(weighted, normed)));
      const ValueId across = is_centred ? sub(weighted, mean(weighted)) : weighted;
      become(result_at(node, 0), mul(sub(across, along), rstd));
    }
    if (result_at(node, 1) != kNoValue) become(result_at(node, 1), column_sum(mul(g, normed)));
    if (is_centred && result_at(node, 2) != kNoValue) become(result_at(node, 2), column_sum(g));
    return true;
  }

  bool rms_norm(const Node& node) {
    const ValueId input = value_at(node, 0), weight = value_at(node, 2);
    if (!has_rows(input) || !is_norm_of_row(node.arguments[1].constant) || !are_plain(node))
      return false;
    if (!are_per_row(node, type(input).sizes)) return false;
    device_ = type(input).device;
    const auto& given = node.arguments[3].constant;
    const double eps = given.isNone() ? epsilon(type(input).dtype) : given.toDouble();
    const ValueId x = wide(input);
    const ValueId squares = mean(mul(x, x));
    const ValueId rstd = unary("aten::rsqrt", binary("aten::add.Scalar", squares, of(eps)));
    ValueId y = mul(x, rstd);
    if (weight != kNoValue) y = mul(y, weight);
    become(result_at(node, 0), y);
    become(result_at(node, 1), rstd);
    return true;
  }

  static double epsilon(at::ScalarType dtype) {
    return dtype == at::kDouble ? std::numeric_limits<double>::epsilon()
                                : std::numeric_limits<float>::epsilon();
  }

  bool softmax(const Node& node) {
    const ValueId input = value_at(node, 0);
    if (!has_rows(input) || !is_last_dim(input, node.arguments[1].constant) || !are_plain(node))
      return false;
    device_ = type(input).device;
    const ValueId x = wide(input);
    const ValueId powers = power_of(input, sub(x, reduce("aten::amax", x)));
    become(result_at(node, 0), binary("aten::div.Tensor", powers, of(row_sum(powers))));
    return true;
  }

  bool softmax_backward(const Node& node) {
    const ValueId gradient = value_at(node, 0), output = value_at(node, 1);
    if (!has_rows(output) || !has_rows(gradient) || !are_plain(node) ||
        !is_last_dim(output, node.arguments[2].constant))
      return false;
    device_ = type(output).device;
    const ValueId g = wide(gradient), y = wide(output);
    become(result_at(node, 0), mul(sub(g, row_sum(mul(g, y))), y));
    return true;
  }

  /// e to the power of `exponent`. Where `given`, of which that was made, has 16 bits, one
  /// multiplication and the GPU's own power of two are as good.
  ValueId power_of(ValueId given, ValueId exponent) {
    const bool is_low = is_half(type(wide_source(given)).dtype);
    if (!is_low) return unary("aten::exp", exponent);
    constexpr double kLog2OfE = 1.4426950408889634;
    return unary("aten::exp2", binary("aten::mul.Scalar", exponent, of(kLog2OfE)));
  }

  /// What log-probabilities are the difference of.
  struct LogSoftmax {
    ValueId input;       // as it was given
    ValueId normaliser;  // per row
  };

  /// The logarithm of the sum of a row's exponentials.
  ValueId normaliser_of(ValueId input) {
    const ValueId x = wide(input);
    const ValueId largest = reduce("aten::amax", x);
    const ValueId sums = row_sum(power_of(input, sub(x, largest)));
    return add(unary("aten::log", sums), largest);
  }

  bool log_softmax(const Node& node) {
    const ValueId input = value_at(node, 0);
    if (!has_rows(input) || !is_last_dim(input, node.arguments[1].constant) || !are_plain(node))
      return false;
    device_ = type(input).device;
    const ValueId normaliser = normaliser_of(input);
    const ValueId output = become(result_at(node, 0), sub(wide(input), normaliser));
    if (!is_consumed(input)) log_softmax_[output] = {input, normaliser};
    return true;
  }

  /// Log-probabilities, computed again if that is possible.
  ValueId log_probabilities(ValueId output) {
    const auto found = log_softmax_.find(output);
    if (found == log_softmax_.end()) return wide(output);
    return sub(wide(found->second.input), found->second.normaliser);
  }

  bool log_softmax_backward(const Node& node) {
    const ValueId gradient = value_at(node, 0), output = value_at(node, 1);
    if (!has_rows(output) || !has_rows(gradient) || !are_plain(node) ||
        !is_last_dim(output, node.arguments[2].constant))
      return false;
    device_ = type(output).device;
    const ValueId g = wide(gradient);
    const auto known_input = log_softmax_.find(output);
    const ValueId given = known_input == log_softmax_.end() ? output : known_input->second.input;
    const ValueId probabilities = power_of(given, log_probabilities(output));
    const auto known = row_sums_.find(gradient);
    const ValueId sum = known == row_sums_.end() ? row_sum(g) : known->second;
    become(result_at(node, 0), sub(g, mul(probabilities, sum)));
    return true;
  }

  /// Targets as a column, which of them count, and where in a row they are.
  struct Targets {
    ValueId column, counted, hit;
  };

  bool takes_targets(const Node& node, ValueId input, ValueId target, ValueId weight) const {
    return has_rows(input) && type(input).sizes.size() == 2 && target != kNoValue &&
           weight == kNoValue && type(target).sizes.size() == 1 && type(target).is_contiguous() &&
           type(target).dtype == at::kLong && type(target).sizes[0] == type(input).sizes[0] &&
           type(input).sizes[1] <= std::numeric_limits<int32_t>::max() && are_plain(node);
  }

  Targets find_targets(ValueId input, ValueId target, const Argument& ignored) {
    const int64_t rows = type(input).sizes[0], classes = type(input).sizes[1];
    device_ = type(input).device;
    const ValueId column =
        emit("aten::unsqueeze", {of(target), of(int64_t{-1})}, at::kLong, {rows, 1});
    const ValueId counted = emit("aten::ne.Scalar", {of(column), ignored}, at::kBool, {rows, 1});
    const ValueId hit = emit(kOneHot, {of(column), of(classes)}, at::kBool, {rows, classes});
    return {column, counted, hit};
  }

  ValueId where(ValueId condition, ValueId value, std::vector<int64_t> sizes) {
    return emit("aten::where.ScalarOther", {of(condition), of(value), of(0.0)}, type(value).dtype,
                std::move(sizes));
  }

  ValueId total(ValueId value) {
    return emit_late("aten::sum", {of(value)}, type(value).dtype, {});
  }

  /// How many targets count. By itself: backward needs it, which then joins forward's kernel.
  ValueId count_of(ValueId target, const Argument& ignored, at::ScalarType dtype) {
    const ValueId counted =
        emit("aten::ne.Scalar", {of(target), ignored}, at::kBool, type(target).sizes);
    return emit("aten::sum", {of(cast(counted, dtype))}, dtype, {});
  }

  /// Whether a target is a class, or ignored.
  ValueId find_fine(const Targets& targets, int64_t classes) {
    const auto shape = type(targets.column).sizes;
    const auto emit_flags = [&](const char* op, ValueId a, Argument b) {
      return emit(op, {of(a), std::move(b)}, at::kBool, shape);
    };
    const ValueId is_low = emit_flags("aten::ge.Scalar", targets.column, of(int64_t{0}));
    const ValueId is_high = emit_flags("aten::lt.Scalar", targets.column, of(classes));
    const ValueId is_class = emit_flags("aten::logical_and", is_low, of(is_high));
    const ValueId is_ignored = unary("aten::logical_not", targets.counted);
    return emit_flags("aten::logical_or", is_class, of(is_ignored));
  }

  /// As ATen's kernel, which stops at a target that is no class.
  void check_all(ValueId fine, int64_t classes) {
    const ValueId all = emit_late("aten::all", {of(fine)}, at::kBool, {});
    add_late("aten::_assert_async.msg",
             {of(all), of(c10::str("cross entropy: expected targets of at least 0 and less than ",
                                   classes, ", the number of classes, or ignore_index"))});
  }

  bool nll_loss(const Node& node) {
    const ValueId input = value_at(node, 0), target = value_at(node, 1);
    if (!takes_targets(node, input, target, value_at(node, 2))) return false;
    const int64_t reduction = node.arguments[3].constant.toInt();
    const int64_t rows = type(input).sizes[0];
    const auto sizes = type(input).sizes;
    const Targets targets = find_targets(input, target, node.arguments[4]);
    const ValueId count = count_of(target, node.arguments[4], sum_dtype(type(input).dtype));
    const ValueId fine = find_fine(targets, sizes[1]);
    const auto known = log_softmax_.find(input);
    // Before the log-probabilities are there: one pass fewer over the row.
    const bool is_known = known != log_softmax_.end();
    const ValueId x = wide(is_known ? known->second.input : input);
    ValueId chosen = row_sum(where(targets.hit, x, sizes));
    if (is_known) chosen = sub(chosen, known->second.normaliser);
    const ValueId losses = where(targets.counted, unary("aten::neg", chosen), type(chosen).sizes);
    check_all(fine, sizes[1]);
    ValueId loss = kNoValue;
    if (reduction == 0) {
      loss = emit_late("aten::view", {of(losses), of(std::vector<int64_t>{rows})}, type(x).dtype,
                       {rows});
    } else {
      loss = total(losses);
      if (reduction == 1) loss = binary("aten::div.Tensor", loss, of(count));
    }
    become(result_at(node, 0), loss);
    become(result_at(node, 1), count);
    return true;
  }

  bool nll_loss_backward(const Node& node) {
    const ValueId gradient = value_at(node, 0), input = value_at(node, 1);
    const ValueId target = value_at(node, 2);
    if (!takes_targets(node, input, target, value_at(node, 3))) return false;
    const int64_t reduction = node.arguments[4].constant.toInt();
    const int64_t rows = type(input).sizes[0];
    const auto dtype = sum_dtype(type(input).dtype);
    const auto sizes = type(input).sizes;
    if (reduction == 0 && !type(gradient).is_contiguous()) return false;
    const Targets targets = find_targets(input, target, node.arguments[5]);
    ValueId scale = cast(gradient, dtype);
    if (reduction == 0)
      scale = emit("aten::view", {of(scale), of(std::vector<int64_t>{rows, 1})}, dtype, {rows, 1});
    if (reduction == 1)
      scale = binary("aten::div.Tensor", scale, of(cast(value_at(node, 6), dtype)));
    const ValueId of_row = where(targets.counted, unary("aten::neg", scale), {rows, 1});
    row_sums_[become(result_at(node, 0), where(targets.hit, of_row, sizes))] = of_row;
    return true;
  }

  bool cross_entropy_rows(const Node& node) {
    const ValueId input = value_at(node, 0), target = value_at(node, 1);
    if (!takes_targets(node, input, target, kNoValue)) return false;
    const auto sizes = type(input).sizes, of_row = row_shape(sizes);
    const Targets targets = find_targets(input, target, node.arguments[3]);
    const ValueId normaliser = normaliser_of(input);
    const ValueId x = wide(input);
    const ValueId chosen = sub(row_sum(where(targets.hit, x, sizes)), normaliser);
    become(result_at(node, 0), where(targets.counted, unary("aten::neg", chosen), of_row));
    const ValueId scale = emit("aten::view", {of(value_at(node, 2)), of(of_row)},
                               type(value_at(node, 2)).dtype, of_row);
    const ValueId factor = where(targets.counted, unary("aten::neg", scale), of_row);
    const ValueId probabilities = power_of(input, sub(x, normaliser));
    become(result_at(node, 1), sub(where(targets.hit, factor, sizes), mul(probabilities, factor)));
    return true;
  }

  /// `result`, of one dimension or with ones before it, is the sum over rows of `value`.
  bool become_column_sum(ValueId result, ValueId value) {
    value = before_views(value);
    if (result == kNoValue || !has_columns(value) || !type(result).is_contiguous()) return false;
    if (type(result).numel() != type(value).sizes.back()) return false;
    device_ = type(value).device;
    ValueId sum = cast(column_sum(value), type(result).dtype);
    if (type(result).sizes != type(sum).sizes)
      sum = emit("aten::view", {of(sum), of(type(result).sizes)}, type(sum).dtype,
                 type(result).sizes);
    become(result, sum);
    return true;
  }

  bool sum(const Node& node) {
    const ValueId input = value_at(node, 0);
    if (input == kNoValue || !node.arguments[1].constant.isIntList()) return false;
    const auto dims = node.arguments[1].constant.toIntVector();
    const auto& from = type(input);
    if (from.sizes.size() < 2 || dims.size() + 1 != from.sizes.size()) return false;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] != static_cast<int64_t>(i)) return false;
    }
    const ValueId result = result_at(node, 0);
    // Elements become integers before they are added, and doubles of floats are added as doubles.
    if (result == kNoValue || !c10::isFloatingType(type(result).dtype) ||
        (type(result).dtype == at::kDouble && from.dtype != at::kDouble))
      return false;
    return become_column_sum(result, input);
  }

  /// A row of ones times a matrix: its columns' sums.
  bool product_with_ones(const Node& node) {
    const ValueId left = value_at(node, 0);
    if (type(left).sizes.at(0) != 1) return false;
    const Node* maker = maker_of(left);
    while (maker != nullptr && is_view(*maker) && value_at(*maker, 0) != kNoValue)
      maker = maker_of(value_at(*maker, 0));
    if (maker == nullptr || !is_ones(*maker)) return false;
    return become_column_sum(result_at(node, 0), value_at(node, 1));
  }

  bool is_ones(const Node& node) const {
    const auto rule = pointwise_rule(graph_, node);
    if (!rule) return false;
    const auto& filled = is_constant_of_sizes(node) ? node.arguments.at(1).constant : c10::IValue();
    return rule->expression == "1" || (filled.isScalar() && filled.toScalar().equal(1.0));
  }

  std::unordered_map<ValueId, LogSoftmax> log_softmax_;  // by log-probabilities
  std::unordered_map<ValueId, ValueId> row_sums_;        // that are known, by value
};

/// Tensors of one number do not wait for those that they are like: the gradient of a loss is there
/// before the loss.
void forget_values(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (node.used().empty() || node.defined().size() != 1 || consumes(node)) continue;
    const auto rule = pointwise_rule(graph, node);
    if (!rule || (rule->expression != "0" && rule->expression != "1")) continue;
    const ValueType& type = graph.type(node.defined()[0]);
    if (!has_row_kernels(type.device) || !type.is_contiguous()) continue;
    node.op = "aten::full";
    node.arguments.clear();
    for (c10::IValue each :
         {c10::IValue(type.sizes), c10::IValue(rule->expression == "1" ? 1.0 : 0.0),
          c10::IValue(static_cast<int64_t>(type.dtype)), c10::IValue(), c10::IValue(type.device),
          c10::IValue()})
      node.arguments.push_back(Argument::of(std::move(each)));
  }
}

}  // namespace

void decompose(Graph& graph) {
  forget_values(graph);
  sink_expands(graph);
  Decomposer(graph).run();
}

}  // namespace tessera::compiler
