#include "dtensor/plan.h"

#include "dtensor/choose.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>

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

void add_moves(Plan& plan, const Call& call, const Candidate& candidate) {
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

void add_outputs(Plan& plan, const Call& call, const Candidate& candidate, ResultShapes shapes) {
  for (size_t i = 0; i < call.output_count(); ++i) {
    Plan::Output output;
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
void add_returns(Plan& plan, const Call& call, const std::vector<bool>& written) {
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

Plan make_plan(const c10::OperatorHandle& op, const Call& call) {
  Plan plan;
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

}  // namespace tessera::dtensor
