#include "compiler/spmd/one_device.h"

#include "compiler/spmd/batch_dims.h"
#include "compiler/spmd/distributed_run.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace tessera::compiler {
namespace {

/// Puts the recorded run in place of a graph's nodes. Its inputs keep their numbers, by which
/// others know them.
class Splice {
 public:
  Splice(Graph& graph, const Recording& recording, const DistributedRun& run)
      : graph_(graph), made_(recording.graph), recording_(recording), run_(run) {
    numbers_.resize(made_.value_count(), kNoValue);
    for (size_t i = 0; i < run.locals().size(); ++i)
      placements_.push_back(run.placement_of_input(i));
  }

  void run(ParallelCall& call) {
    join_inputs(call);
    graph_.nodes = made_.nodes;
    for (auto& node : graph_.nodes) {
      for (const auto value : node.defined()) define(value);
      for (auto* side : {&node.arguments, &node.results}) {
        for (auto& argument : *side) {
          for (auto& value : argument.values) value = renamed(value);
        }
      }
    }
    for (size_t i = 0; i < graph_.outputs.size(); ++i)
      graph_.outputs[i].value = renamed(made_.outputs.at(i).value);
    for (const auto& [value, placement] : run_.placements()) {
      if (renamed(value) != kNoValue) graph_.type(renamed(value)).placement = placement;
    }
    for (size_t i = 0; i < run_.locals().size(); ++i) {
      const auto kind = graph_.inputs[i].kind;
      if (kind != InputKind::Buffer && kind != InputKind::Outside)
        graph_.type(graph_.inputs[i].value).placement = placements_[i];
    }
  }

 private:
  ValueId renamed(ValueId value) const {
    return value == kNoValue ? kNoValue : numbers_.at(static_cast<size_t>(value));
  }
  void define(ValueId value) {
    numbers_.at(static_cast<size_t>(value)) = graph_.add_value(made_.type(value));
  }

  /// Constants of the run come behind the graph's inputs; some of these it may not use.
  void join_inputs(ParallelCall& call) {
    std::vector<bool> is_joined(run_.locals().size(), false);
    for (const auto& input : recording_.inputs) {
      bool is_known = false;
      for (size_t i = 0; i < is_joined.size() && !is_known; ++i) {
        if (is_joined[i] || !shows_same_memory(input.tensor, run_.locals()[i])) continue;
        is_joined[i] = is_known = true;
        numbers_.at(static_cast<size_t>(input.value)) = graph_.inputs[i].value;
      }
      if (is_known) continue;
      define(input.value);
      graph_.inputs.push_back(
          {renamed(input.value), InputKind::Outside, c10::str("constant ", call.constants.size())});
      call.constants.push_back(input.tensor);
    }
    for (size_t i = 0; i < is_joined.size(); ++i)
      graph_.type(graph_.inputs[i].value) = type_of(run_.locals()[i]);
  }

  Graph& graph_;
  const Graph& made_;
  const Recording& recording_;
  const DistributedRun& run_;
  std::vector<Placement> placements_;  // by input
  std::vector<ValueId> numbers_;       // by value of the run
};

}  // namespace

void expand_as_one_device(Graph& graph, ParallelCall& call, const OneDeviceSettings& settings) {
  const auto found = find_batch_dims(graph, call.mesh);
  DistributedRun run(graph, found.interleaved, call, settings);
  const auto recording = run.recorded();
  TORCH_CHECK(recording.broken.empty(), "DataParallel: expected a step that can be captured on ",
              "distributed tensors, but ", recording.broken);
  Splice(graph, recording, run).run(call);
}

}  // namespace tessera::compiler
