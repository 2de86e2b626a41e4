#include "compiler/spmd/one_device.h"

#include "comm/functional.h"
#include "compiler/spmd/batch_dims.h"
#include "compiler/spmd/distributed_run.h"
#include "dtensor/debug.h"
#include "dtensor/sharding.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

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

namespace {

std::vector<dtensor::Chunk> intervals(const std::vector<int64_t>& lengths) {
  std::vector<dtensor::Chunk> found;
  int64_t offset = 0;
  for (const auto length : lengths) {
    found.push_back({offset, length});
    offset += length;
  }
  return found;
}

int64_t overlap(const dtensor::Chunk& one, const dtensor::Chunk& other) {
  const auto end = std::min(one.offset + one.length, other.offset + other.length);
  return std::max<int64_t>(end - std::max(one.offset, other.offset), 0);
}

}  // namespace

std::vector<int64_t> chunk_lengths(int64_t size, int64_t ranks) {
  std::vector<int64_t> lengths;
  for (int64_t rank = 0; rank < ranks; ++rank)
    lengths.push_back(dtensor::chunk_of(size, ranks, rank).length);
  return lengths;
}

at::Tensor move_rows(const at::Tensor& local, int64_t tensor_dim, const std::vector<int64_t>& from,
                     const std::vector<int64_t>& to, const Group& group) {
  if (from == to) return local;
  const auto mine = static_cast<size_t>(group->getRank());
  const auto before = intervals(from), after = intervals(to);
  const auto rows = local.movedim(tensor_dim, 0).contiguous();
  auto sizes = rows.sizes().vec();
  sizes[0] = 1;
  const int64_t row = c10::multiply_integers(sizes);
  std::vector<int64_t> sent, received;
  for (size_t rank = 0; rank < from.size(); ++rank) {
    sent.push_back(overlap(before[mine], after[rank]) * row);
    received.push_back(overlap(before[rank], after[mine]) * row);
  }
  sizes[0] = to[mine];
  dtensor::count_collective("all_to_all", rows.nbytes());
  const auto pending = comm::functional::all_to_all(rows.view({-1}), received, sent, group);
  return comm::functional::wait(pending).view(sizes).movedim(0, tensor_dim);
}

}  // namespace tessera::compiler
