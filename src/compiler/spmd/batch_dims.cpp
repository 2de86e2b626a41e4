#include "compiler/spmd/batch_dims.h"

#include "compiler/ir/operators.h"
#include "compiler/spmd/node_call.h"
#include "dtensor/rules.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace tessera::compiler {
namespace {

/// What is known of a value.
struct Known {
  enum class Kind {
    Nothing,
    Made,  // of no other value, as by zeros(): its rows are as many as this rank's
    Placed,
  };
  Kind kind = Kind::Nothing;
  Placement placement = Replicate();
  int argument = -1;   // of a batch: the input it came with
  int64_t outer = 1;   // of a batch: how long what its dimension has outside of it is
  int parameter = -1;  // the input of which it is a view, if that is a parameter

  bool is_batch() const { return kind == Kind::Placed && placement.is_shard(); }
  /// A rank's value is what the row wants, without communication or computation.
  bool is(const Placement& wanted) const {
    if (kind == Kind::Nothing) return false;
    if (kind == Kind::Placed && placement == wanted) return true;
    const bool is_equal = kind == Kind::Made || placement.is_replicate();
    if (!is_equal || wanted.is_replicate()) return is_equal;
    if (wanted.is_shard()) return kind == Kind::Made;
    // Of equals the average, the largest and the smallest are the same.
    const auto op = wanted.reduce_op();
    return op == ReduceOp::AVG || op == ReduceOp::MAX || op == ReduceOp::MIN;
  }
};

bool is_mean(const dtensor::Call& call) {
  return call.has_argument("reduction") && call.argument("reduction").isInt() &&
         call.argument("reduction").toInt() == at::Reduction::Mean;
}

/// The dimension of a batch in a view of its tensor, and what lies outside of it there. A batch of
/// one sample leaves no trace in sizes: it is joined with what is before it if all behind it stays.
std::pair<int64_t, int64_t> batch_in_view(const std::vector<int64_t>& before, const Known& batch,
                                          const std::vector<int64_t>& after, bool is_one) {
  const auto dim = batch.placement.dim();
  const auto behind = before.begin() + dim + 1;
  if (batch.outer == 1 && std::ssize(after) > dim &&
      std::equal(before.begin(), behind, after.begin()))
    return {dim, 1};
  int64_t outer = batch.outer, seen = 1;
  for (int64_t i = 0; i < dim; ++i) outer *= before[static_cast<size_t>(i)];
  for (size_t i = 0; i < after.size(); ++i) {
    const auto next = seen * after[i];
    const bool ends =
        is_one && next == outer &&
        std::equal(after.begin() + static_cast<long>(i) + 1, after.end(), behind, before.end());
    const bool is_alone = is_one && seen == outer && after[i] == 1;
    if (next > outer || ends || is_alone) return {static_cast<int64_t>(i), outer / seen};
    seen = next;
  }
  return {0, 1};
}

/// Of a write to a part of a tensor's memory, tessera::window_scatter: samples stay apart if they
/// lie along one dimension of the tensor, and along what shows of it in the part.
dtensor::Rows window_rows(const dtensor::Call& call) {
  const auto& whole = call.operand(0);
  const auto sizes = call.argument("size").toIntVector();
  const auto strides = call.argument("stride").toIntVector();
  dtensor::Rows rows;
  for (int64_t dim = 0; dim < whole.ndim(); ++dim) {
    const auto step = whole.strides[dim];
    bool shows = false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool is_along = strides[i] >= step && strides[i] < step * whole.sizes[dim];
      shows |= is_along && sizes[i] > 1;
      if (is_along || sizes[i] == 1)
        rows.push_back({Shard(dim), Shard(dim), Shard(static_cast<int64_t>(i))});
    }
    if (!shows) rows.push_back({Shard(dim), Shard(dim), Replicate()});
  }
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG})
    rows.push_back({Partial(op), Partial(op), Partial(op)});
  return rows;
}

bool is_reshape(const Node& node) {
  return node.op == "aten::view" || node.op == "aten::_unsafe_view" ||
         node.op == "aten::_reshape_alias";
}

class Analysis {
 public:
  Analysis(Graph& graph, const DeviceMesh& mesh, bool refuses_one)
      : graph_(graph),
        mesh_(mesh),
        refuses_one_(refuses_one),
        known_(graph.value_count()),
        in_backward_(graph.value_count(), false) {}

  BatchDims run() {
    for (size_t i = 0; i < graph_.inputs.size(); ++i) place_input(static_cast<int>(i));
    for (size_t i = 0; i < graph_.nodes.size(); ++i) visit(i);
    for (const auto& node : graph_.nodes) {
      for (const auto value : node.defined()) {
        if (at(value).kind == Known::Kind::Placed)
          graph_.type(value).placement = at(value).placement;
      }
    }
    BatchDims found{std::move(mixes_), {}};
    for (const auto& known : known_) found.interleaved.push_back(known.outer > 1);
    return found;
  }

 private:
  Known& at(ValueId value) { return known_.at(static_cast<size_t>(value)); }
  const Known& at(ValueId value) const { return known_.at(static_cast<size_t>(value)); }
  const std::vector<int64_t>& sizes_of(ValueId value) const { return graph_.type(value).sizes; }

  void place_input(int index) {
    const auto& input = graph_.inputs[static_cast<size_t>(index)];
    auto& known = at(input.value);
    known.kind = Known::Kind::Placed;
    known.placement = graph_.type(input.value).placement.value_or(Replicate());
    if (known.is_batch()) known.argument = index;
    if (input.kind == InputKind::Parameter) known.parameter = index;
  }

  void visit(size_t index) {
    const auto& node = graph_.nodes[index];
    const auto op = find_operator(node.op);
    if (!op || is_collective(node) || node.op == "tessera::gradient") return;
    const auto used = node.used();
    const auto all = [&](auto predicate) {
      return std::all_of(used.begin(), used.end(), [&](ValueId v) { return predicate(at(v)); });
    };
    note_backward(node, used);
    if (used.empty() || all([](const Known& known) { return known.kind == Known::Kind::Made; }))
      return set_all(node, Known{.kind = Known::Kind::Made});
    if (all([](const Known& known) { return known.is(Replicate()); })) {
      Known result{.kind = Known::Kind::Placed};
      if (used.size() == 1 && is_view(node)) result.parameter = at(used[0]).parameter;
      return set_all(node, result);
    }
    if (!by_rule(index, *op)) by_size(node);
  }

  void set_all(const Node& node, const Known& known) {
    for (const auto value : node.defined()) at(value) = known;
  }

  /// Backward begins with the derivative of a loss after itself.
  void note_backward(const Node& node, const std::vector<ValueId>& used) {
    const bool begins = node.op == "aten::ones_like" && used.size() == 1 &&
                        sizes_of(used[0]).empty() && at(used[0]).kind != Known::Kind::Made;
    const bool goes_on = std::any_of(used.begin(), used.end(), [&](ValueId value) {
      return in_backward_[static_cast<size_t>(value)];
    });
    if (!begins && !goes_on) return;
    for (const auto value : node.defined()) in_backward_[static_cast<size_t>(value)] = true;
  }

  bool is_in_backward(const Node& node) const {
    const auto defined = node.defined();
    return !defined.empty() && in_backward_[static_cast<size_t>(defined[0])];
  }

  /// The operand whose batch the node works on; kNoValue if none has one.
  ValueId batch_operand(const Node& node) const {
    for (const auto value : node.used()) {
      if (at(value).is_batch()) return value;
    }
    return kNoValue;
  }

  bool is_one_sample(const Known& batch) const {
    const auto& type = graph_.type(graph_.inputs[static_cast<size_t>(batch.argument)].value);
    return type.sizes[static_cast<size_t>(type.placement->dim())] == 1;
  }

  void mix(size_t index, std::optional<int64_t> ignored_target = std::nullopt) {
    const auto& node = graph_.nodes[index];
    if (!is_in_backward(node)) mixes_.push_back({index, each_rank_computes(node), ignored_target});
  }

  /// False: no row tells of the results.
  bool by_rule(size_t index, const c10::OperatorHandle& op) {
    const auto& node = graph_.nodes[index];
    const auto used = node.used();
    const bool are_known = std::all_of(used.begin(), used.end(), [&](ValueId value) {
      return at(value).kind != Known::Kind::Nothing;
    });
    if (!are_known) return false;
    // Rules know of no batch inside of a dimension, and follow none that is 1 long.
    const auto batch = batch_operand(node);
    if (is_reshape(node) && batch != kNoValue && (at(batch).outer > 1 || is_one_sample(at(batch))))
      return false;
    // Lists of tensors that have nothing to do with each other, as an optimizer's.
    if (node.op.starts_with("aten::_foreach_") || node.op.starts_with("aten::_fused_"))
      return false;
    const auto* rule = dtensor::find_rule(op);
    const dtensor::Call call(op.schema(), stack_of(node, op.schema()));
    const auto rows = rows_of(node, rule, call);
    for (const auto& row : rows) {
      if (!fits(node, call, row)) continue;
      if (rule != nullptr && communicates(*rule, call, row)) break;
      place_results(index, call, row);
      return true;
    }
    check_parameters(node, call, rows);
    if (!is_view(node)) mix(index);
    return false;
  }

  static dtensor::Rows rows_of(const Node& node, const dtensor::Rule* rule,
                               const dtensor::Call& call) {
    if (node.op == "tessera::window_scatter") return window_rows(call);
    if (rule == nullptr || !rule->rows) return {};
    try {
      // Every rank has as many rows as any other: as if there were one.
      return rule->rows(call, /*ranks=*/1);
    } catch (const c10::Error&) {
      return {};  // a rule that refuses the call tells nothing of it
    }
  }

  template <class Accepts>
  bool fits(const Node& node, const dtensor::Call& call, const dtensor::Row& row,
            Accepts accepts) const {
    for (size_t i = 0; i < call.input_count(); ++i) {
      const auto& wanted = row.placements.at(call.output_count() + i);
      const auto& argument = node.arguments[call.inputs()[i].index];
      if (!call.has(i)) continue;
      if (argument.values.empty() && wanted != Replicate()) return false;  // a number
      for (const auto value : argument.values) {
        if (value != kNoValue && !accepts(value, wanted)) return false;
      }
    }
    return true;
  }

  bool fits(const Node& node, const dtensor::Call& call, const dtensor::Row& row) const {
    return fits(node, call, row, [&](ValueId value, const Placement& wanted) {
      return at(value).is(wanted) || is_broadcast_to_one(node, value, wanted);
    });
  }

  /// Beside a batch of one sample, what is as long as one is broadcast.
  bool is_broadcast_to_one(const Node& node, ValueId value, const Placement& wanted) const {
    return is_pointwise(node) && wanted.is_shard() && at(value).is(Replicate()) &&
           sizes_of(value)[static_cast<size_t>(wanted.dim())] == 1;
  }

  /// A result that all ranks share, of operands that they don't, by a computation of the rule's
  /// own.
  static bool communicates(const dtensor::Rule& rule, const dtensor::Call& call,
                           const dtensor::Row& row) {
    const auto first = row.placements.begin() + static_cast<long>(call.output_count());
    return rule.run && call.output_count() > 0 && row.placements[0].is_replicate() &&
           std::any_of(first, row.placements.end(),
                       [](const auto& each) { return each.is_shard(); });
  }

  void place_results(size_t index, const dtensor::Call& call, const dtensor::Row& row) {
    const auto& node = graph_.nodes[index];
    const auto batch = batch_operand(node);
    size_t next = 0;
    const auto place = [&](const Placement& placement) {
      if (next >= node.results.size()) return;
      Known known{.kind = Known::Kind::Placed, .placement = placement};
      // The operator itself divides by this rank's count, and the ranks' means are averaged.
      if (is_mean(call) && placement == Partial()) known.placement = Partial("avg");
      if (known.is_batch() && batch != kNoValue) {
        known.argument = at(batch).argument;
        known.outer = at(batch).outer;
      }
      for (const auto value : node.results[next].values) {
        if (value != kNoValue) at(value) = known;
      }
      ++next;
    };
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (size_t k = 0; k < call.input_count(); ++k) {
        if (call.inputs()[k].index == i) place(row.placements.at(call.output_count() + k));
      }
    }
    for (const size_t i : own_returns(call.schema())) place(row.placements.at(i));
    if (is_mean(call) && node.op.starts_with("aten::nll_loss") && call.output_count() == 2)
      note_targets(index, call);
  }

  /// The mean of a negative log likelihood is one over what its targets weigh.
  void note_targets(size_t index, const dtensor::Call& call) {
    const auto& node = graph_.nodes[index];
    for (const auto value : node.results.back().values) {
      if (value != kNoValue) at(value) = Known{.kind = Known::Kind::Made};  // fits backward
    }
    const bool is_weighted = call.has(2);
    mix(index, is_weighted ? std::nullopt : std::optional(call.argument("ignore_index").toInt()));
  }

  /// A row that wants parameters cut along the batch shows that it is none.
  void check_parameters(const Node& node, const dtensor::Call& call,
                        const dtensor::Rows& rows) const {
    const auto batch = batch_operand(node);
    // Where one sample is, views leave unsure.
    if (batch == kNoValue || (is_one_sample(at(batch)) && !refuses_one_)) return;
    const Known* tied = nullptr;
    for (const auto& row : rows) {
      tied = nullptr;
      const bool is_tied = fits(node, call, row, [&](ValueId value, const Placement& wanted) {
        const auto& known = at(value);
        if (known.parameter >= 0 && wanted.is_shard()) return (tied = &known), true;
        if (known.parameter >= 0 && wanted.is_partial()) return true;  // a bias beside it
        return known.is(wanted);
      });
      if (is_tied && tied != nullptr) break;
      tied = nullptr;
    }
    if (tied == nullptr) return;
    const auto& input = graph_.inputs[static_cast<size_t>(at(batch).argument)];
    const auto& type = graph_.type(input.value);
    TORCH_CHECK_VALUE(
        false, "DataParallel: expected the batch of ", input.name, " along dimension ",
        type.placement->dim(), " of its sizes ", c10::IntArrayRef(type.sizes), ", but ",
        describe(node), " matches that dimension with one of ",
        graph_.inputs[static_cast<size_t>(tied->parameter)].name,
        ", whose length no batch changes; give another input_batch_dim, or input_batch_dims for "
        "each tensor");
  }

  void by_size(const Node& node) {
    const auto batch = batch_operand(node);
    if (batch == kNoValue) return;
    const auto dim = at(batch).placement.dim();
    const auto& sizes = sizes_of(batch);
    const auto length = sizes[static_cast<size_t>(dim)];
    for (const auto value : node.defined()) {
      const auto& after = sizes_of(value);
      const auto has_length = [&](int64_t i) {
        return i < std::ssize(after) && after[static_cast<size_t>(i)] == length;
      };
      Known known{.kind = Known::Kind::Placed, .argument = at(batch).argument};
      int64_t found = -1;
      const bool is_cut = is_view(node) && after.size() == sizes.size();  // a rank's own part
      if (is_reshape(node) && !after.empty())
        std::tie(found, known.outer) =
            batch_in_view(sizes, at(batch), after, is_one_sample(at(batch)));
      else if (is_cut || has_length(dim))
        found = dim;
      else
        for (int64_t i = std::ssize(after); i-- > 0;) found = has_length(i) ? i : found;
      if (found < 0) continue;
      known.placement = Shard(found);
      at(value) = known;
    }
  }

  torch::jit::Stack stack_of(const Node& node, const c10::FunctionSchema& schema) const {
    return arguments_of(node, schema, [this](ValueId value) { return like(value); });
  }

  /// Rules look at sizes and placements alone.
  at::Tensor like(ValueId value) const {
    if (value == kNoValue) return {};
    const auto& type = graph_.type(value);
    const auto local =
        at::empty_strided(type.sizes, type.strides, at::TensorOptions(at::kMeta).dtype(type.dtype));
    return dtensor::wrap(local, dtensor::make_spec(mesh_, {at(value).placement}), type.sizes,
                         type.strides);
  }

  Graph& graph_;
  const DeviceMesh& mesh_;
  const bool refuses_one_;
  std::vector<Known> known_;
  std::vector<bool> in_backward_;  // by value
  std::vector<SampleMix> mixes_;
};

}  // namespace

BatchDims find_batch_dims(Graph& graph, const DeviceMesh& mesh, bool refuses_one) {
  return Analysis(graph, mesh, refuses_one).run();
}

}  // namespace tessera::compiler
