#include "dtensor/plan.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::dtensor {
namespace {

SpecPtr find_mesh(const Call& call) {
  SpecPtr found;
  const auto look = [&](const std::vector<TensorArgument>& arguments) {
    for (const auto& argument : arguments) {
      for (const auto& operand : argument.operands) {
        if (!operand.spec) continue;
        if (!found) found = operand.spec;
        check_one_mesh(call.schema().name(), *found, *operand.spec);
      }
    }
  };
  look(call.inputs());
  look(call.destinations());
  return found;
}

void add_moves(CallPlan& plan, const Call& call, const Candidate& candidate) {
  for (size_t i = 0; i < call.input_count(); ++i) {
    const auto& input = call.inputs()[i];
    const auto wanted = make_spec(plan.mesh->mesh, candidate.inputs[i]);
    for (size_t j = 0; j < input.operands.size(); ++j) {
      const auto& operand = input.operands[j];
      const auto now = operand.spec ? operand.spec : replicated(*plan.mesh);
      if (now->placements == wanted->placements) continue;
      plan.moves.push_back(
          {input.index, input.positions[j], wanted,
           find_path(layout_of(operand, *plan.mesh), now->placements, wanted->placements)});
    }
  }
}

void add_outputs(CallPlan& plan, const Call& call, const Candidate& candidate,
                 ResultShapes shapes) {
  for (size_t i = 0; i < call.output_count(); ++i) {
    CallPlan::Output output;
    output.spec = make_spec(plan.mesh->mesh, candidate.outputs[i]);
    output.same_as = written_argument(call.schema(), i);
    output.is_view = call.schema().returns()[i].alias_info() != nullptr && !output.same_as;
    if (!shapes.empty()) output.shapes = std::move(shapes[i]);
    plan.outputs.push_back(std::move(output));
  }
}

Candidate all_replicated(const Call& call, size_t mesh_ndim) {
  return {std::vector<Placements>(call.output_count(), Placements(mesh_ndim)),
          std::vector<Placements>(call.input_count(), Placements(mesh_ndim))};
}

std::vector<bool> written_inputs(const Call& call, const Rule& rule) {
  std::vector<bool> written;
  for (size_t i = 0; i < call.input_count(); ++i) {
    const bool is_hidden =
        std::find(rule.also_writes.begin(), rule.also_writes.end(), i) != rule.also_writes.end();
    written.push_back(call.inputs()[i].is_written || is_hidden);
  }
  return written;
}

/// What is written stays where it is if there is a way to; otherwise it is moved, written, and
/// brought back. A target that is Partial can't be brought back in every case.
void add_returns(CallPlan& plan, const Call& call, const std::vector<bool>& written) {
  const auto moves = plan.moves;
  for (size_t i = 0; i < written.size(); ++i) {
    if (!written[i]) continue;
    const auto& input = call.inputs()[i];
    for (const auto& move : moves) {
      if (move.argument != input.index) continue;
      const auto& operand = input.operands.front();
      TORCH_CHECK(operand.spec && !input.is_list, call.schema().name(),
                  ": expected a distributed tensor to write to, got a plain one of sizes ",
                  c10::IntArrayRef(operand.sizes),
                  " next to distributed ones; distribute it first");
      auto path =
          find_path(layout_of(operand, *plan.mesh), move.to->placements, operand.spec->placements);
      TORCH_CHECK(
          std::isfinite(path.cost), call.schema().name(),
          ": an operation in place leaves its target placed ", c10::str(operand.spec->placements),
          ", and there is no way to bring the result there; redistribute the target first, ",
          "or use the form that returns a new tensor");
      plan.returns.push_back({move.argument, move.to, std::move(path)});
    }
  }
}

/// Where a generator is to be given on which all ranks agree: they draw for a result they all hold.
std::optional<size_t> generator_of(const c10::OperatorHandle& op, const Rule& rule) {
  if (rule.run || !op.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  const auto index = op.schema().argumentIndexWithName("generator");
  return index ? std::optional(static_cast<size_t>(*index)) : std::nullopt;
}

/// Fused attention and recurrent layers, which drop elements: only if they are asked to.
bool draws_by_itself(const c10::OperatorHandle& op, const Rule& rule, const Call& call) {
  if (rule.run || !op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  if (call.has_argument("generator") || call.output_count() == 0) return false;
  if (call.schema().returns()[0].type()->kind() == c10::TypeKind::IntType) return false;
  for (const auto* name : {"dropout_p", "dropout", "p"}) {
    if (call.has_argument(name) && call.argument(name).isDouble())
      return call.argument(name).toDouble() > 0;
  }
  return true;
}

}  // namespace

CallPlan make_plan(const c10::OperatorHandle& op, const Call& call) {
  CallPlan plan;
  plan.mesh = find_mesh(call);
  plan.rule = find_rule(op);
  plan.destinations = call.destinations();
  static const Rule kNoRule{[](const Call&, int64_t) { return Rows(); }};
  const Rule& rule = plan.rule == nullptr ? kNoRule : *plan.rule;

  auto [shapes, is_doubtful] = infer_shapes(op, call, plan.rule);
  const auto written = written_inputs(call, rule);
  std::optional<Candidate> chosen;
  if (!is_doubtful) {
    chosen = choose(call, rule, *plan.mesh, shapes, written);
    if (!chosen) chosen = choose(call, rule, *plan.mesh, shapes, std::vector<bool>(written.size()));
  }
  if (!chosen) chosen = all_replicated(call, plan.mesh->placements.size());
  add_moves(plan, call, *chosen);
  add_returns(plan, call, written);
  add_outputs(plan, call, *chosen, std::move(shapes));
  plan.generator = generator_of(op, rule);
  plan.draws_by_itself = draws_by_itself(op, rule, call);
  plan.choice = {plan.mesh, chosen->outputs, chosen->inputs};
  if (rule.run) {
    for (size_t i = 0; i < call.input_count(); ++i) {
      plan.input_sizes.push_back(call.has(i) ? call.operand(i).sizes : Sizes{});
      plan.choice.strides.push_back(call.has(i) ? call.operand(i).strides : Sizes{});
    }
  }
  if (rule.adapt) {
    LocalArguments local;
    rule.adapt(call, plan.choice, local);
    plan.replaced = std::move(local.replaced);
  }
  return plan;
}

namespace {

class Chooser {
 public:
  Chooser(const Call& call, const Rule& rule, const Spec& mesh, const ResultShapes& shapes,
          const std::vector<bool>& fixed)
      : call_(call),
        rule_(rule),
        mesh_(mesh),
        shapes_(shapes),
        is_fixed_(fixed),
        has_fixed_(std::find(fixed.begin(), fixed.end(), true) != fixed.end()) {
    for (size_t dim = 0; dim < mesh.placements.size(); ++dim) rows_.push_back(rows_of(dim));
    costs_.resize(call.input_count());
  }

  std::optional<Candidate> run() {
    Candidate candidate;
    candidate.outputs.resize(call_.output_count());
    candidate.inputs.resize(call_.input_count());
    extend(candidate, 0);
    return std::move(best_);
  }

 private:
  const Placement& present(const Operand& operand, size_t mesh_dim) const {
    static const Placement kReplicate;
    return operand.spec ? operand.spec->placements[mesh_dim] : kReplicate;
  }

  std::vector<Row> rows_of(size_t mesh_dim) const {
    std::vector<Row> rows;
    const auto add = [&](Row row) {
      if (rule_.takes_any_indices) use_strides(row, mesh_dim);
      if (keeps_targets(row) && fits(row, mesh_dim)) rows.push_back(std::move(row));
    };
    add(Row(call_.row()));
    for (auto& row : rule_.rows(call_, mesh_.mesh_shape[mesh_dim])) {
      TORCH_INTERNAL_ASSERT(row.placements.size() == call_.output_count() + call_.input_count(),
                            "the rule of ", call_.schema(), " has a row of ",
                            row.placements.size());
      add(std::move(row));
    }
    return rows;
  }

  /// Where an input has a strided shard, the whole row means that shard.
  void use_strides(Row& row, size_t mesh_dim) const {
    for (size_t i = 0; i < call_.input_count(); ++i) {
      if (!call_.has(i)) continue;
      const auto& wanted = row.placements[call_.output_count() + i];
      const auto now = present(call_.operand(i), mesh_dim);
      if (!wanted.is_shard() || !now.is_strided() || now.dim() != wanted.dim()) continue;
      for (auto& placement : row.placements) {
        if (placement.is_shard()) placement = StridedShard(placement.dim(), now.split_factor());
      }
      return;
    }
  }

  /// A result that is the target itself lies where the target does.
  bool keeps_targets(const Row& row) const {
    for (size_t output = 0; output < call_.output_count(); ++output) {
      const auto argument = written_argument(call_.schema(), output);
      if (!argument) continue;
      for (size_t i = 0; i < call_.input_count(); ++i) {
        if (call_.inputs()[i].index == *argument &&
            !(row.placements[output] == row.placements[call_.output_count() + i]))
          return false;
      }
    }
    return true;
  }

  bool fits(const Row& row, size_t mesh_dim) const {
    for (size_t i = 0; i < call_.input_count(); ++i) {
      const auto& wanted = row.placements[call_.output_count() + i];
      for (const auto& operand : call_.inputs()[i].operands) {
        const auto& now = present(operand, mesh_dim);
        if (is_fixed_[i] && !(now == wanted)) return false;
        if (wanted.is_shard() && wanted.dim() >= operand.ndim()) return false;
        if (!wanted.is_partial() || now == wanted) continue;
        if (now.is_shard() && has_fixed_ && fills_with_zeros(wanted)) continue;
        if (!now.is_replicate() || wanted.reduce_op() == ReduceOp::PRODUCT) return false;
      }
    }
    return true;
  }

  void extend(Candidate& candidate, size_t mesh_dim) {
    if (mesh_dim == rows_.size()) return judge(candidate);
    for (const auto& row : rows_[mesh_dim]) {
      const bool was_even = candidate.even;
      candidate.even = candidate.even || row.even;
      for (size_t i = 0; i < candidate.outputs.size(); ++i)
        candidate.outputs[i].push_back(row.placements[i]);
      for (size_t i = 0; i < candidate.inputs.size(); ++i)
        candidate.inputs[i].push_back(row.placements[candidate.outputs.size() + i]);
      extend(candidate, mesh_dim + 1);
      for (auto& output : candidate.outputs) output.pop_back();
      for (auto& input : candidate.inputs) input.pop_back();
      candidate.even = was_even;
    }
  }

  void judge(const Candidate& candidate) {
    double cost = 0;
    for (size_t i = 0; i < candidate.inputs.size() && cost < best_cost_; ++i)
      cost += cost_of(i, candidate.inputs[i]);
    if (cost >= best_cost_ || !is_sound(candidate)) return;
    best_cost_ = cost;
    best_ = candidate;
  }

  double cost_of(size_t input, const Placements& wanted) {
    for (const auto& [placements, cost] : costs_[input]) {
      if (placements == wanted) return cost;
    }
    double cost = 0;
    for (const auto& operand : call_.inputs()[input].operands) {
      const auto now = operand.spec ? operand.spec->placements : Placements(wanted.size());
      cost += find_path(layout_of(operand, mesh_), now, wanted).cost;
    }
    costs_[input].emplace_back(wanted, cost);
    return cost;
  }

  bool is_sound(const Candidate& candidate) const {
    for (size_t i = 0; i < candidate.inputs.size(); ++i) {
      for (const auto& operand : call_.inputs()[i].operands) {
        if (!is_sound(candidate, operand.sizes, candidate.inputs[i])) return false;
      }
    }
    for (size_t i = 0; i < candidate.outputs.size(); ++i) {
      if (!is_one_kind(candidate.outputs[i])) return false;
      if (shapes_.empty()) continue;
      for (const auto& shape : shapes_[i]) {
        if (!is_sound(candidate, shape.sizes, candidate.outputs[i])) return false;
      }
    }
    return !shapes_.empty() || tells_its_shape(candidate);
  }

  bool is_sound(const Candidate& candidate, const Sizes& sizes,
                const Placements& placements) const {
    for (const auto& placement : placements) {
      if (placement.is_shard() && placement.dim() >= static_cast<int64_t>(sizes.size()))
        return false;
    }
    if (candidate.even && !is_even(sizes, placements, mesh_.mesh_shape)) return false;
    return rule_.takes_empty_shards || !has_empty_shard(sizes, placements, mesh_.mesh_shape);
  }

  /// Without known shapes a sharded result is measured by its local part: all must be alike.
  bool tells_its_shape(const Candidate& candidate) const {
    const bool is_cut = std::any_of(
        candidate.outputs.begin(), candidate.outputs.end(), [](const Placements& placements) {
          return std::any_of(placements.begin(), placements.end(),
                             [](const auto& placement) { return placement.is_shard(); });
        });
    if (!is_cut) return true;
    for (size_t i = 0; i < candidate.inputs.size(); ++i) {
      for (const auto& operand : call_.inputs()[i].operands) {
        if (!is_even(operand.sizes, candidate.inputs[i], mesh_.mesh_shape)) return false;
      }
    }
    return true;
  }

  const Call& call_;
  const Rule& rule_;
  const Spec& mesh_;
  const ResultShapes& shapes_;
  const std::vector<bool>& is_fixed_;
  /// Something is written: a target that is Partial stays so, and shards are added to it as
  /// summands. What is new is better off with the target reduced to their shards.
  const bool has_fixed_;
  std::vector<std::vector<Row>> rows_;                             // by mesh dimension
  std::vector<std::vector<std::pair<Placements, double>>> costs_;  // by input, of known placements
  std::optional<Candidate> best_;
  double best_cost_ = std::numeric_limits<double>::infinity();
};

}  // namespace

std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t output) {
  const auto* alias = schema.returns()[output].alias_info();
  if (alias == nullptr || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets())
      return i;
  }
  return std::nullopt;
}

std::optional<Candidate> choose(const Call& call, const Rule& rule, const Spec& mesh,
                                const ResultShapes& shapes, const std::vector<bool>& fixed) {
  auto chosen = Chooser(call, rule, mesh, shapes, fixed).run();
  if (!chosen) return chosen;
  for (auto& placements : chosen->outputs) placements = canonical(placements, mesh.mesh_shape);
  for (auto& placements : chosen->inputs) placements = canonical(placements, mesh.mesh_shape);
  return chosen;
}

}  // namespace tessera::dtensor
