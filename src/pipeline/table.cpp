// Tables of actions: as text, verified, simulated. See include/tessera/pipeline.h.
#include <tessera/pipeline.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <set>
#include <tuple>

namespace tessera {
namespace {

using Kind = PipelineAction::Kind;
constexpr const char* kVerify = "verify_pipeline_table";

char letter(Kind kind) {
  constexpr const char* kLetters = "FBIW";
  return kLetters[static_cast<size_t>(kind)];
}

bool brings_input_gradient(Kind kind) {
  return kind == Kind::Backward || kind == Kind::BackwardInput;
}

/// Runs the actions of all ranks, each as soon as it can be.
class Simulator {
 public:
  Simulator(const PipelineTable& table, PipelineCosts costs)
      : table_(table), costs_(costs), next_(table.actions.size()), clocks_(table.actions.size()) {}

  /// True: all have run. Otherwise stuck() says what waits.
  bool run() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (size_t rank = 0; rank < next_.size(); ++rank) {
        while (next_[rank] < table_.actions[rank].size() && try_next(rank)) has_moved = true;
      }
    }
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (next_[rank] < table_.actions[rank].size()) return false;
    }
    return true;
  }

  std::string stuck() const {
    std::string text;
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (next_[rank] == table_.actions[rank].size()) continue;
      text += c10::str(text.empty() ? "" : ", ", "rank ", rank, " at ",
                       table_.actions[rank][next_[rank]]);
    }
    return text;
  }

  double duration() const { return *std::max_element(clocks_.begin(), clocks_.end()); }
  double busy() const { return busy_; }

 private:
  using Key = std::tuple<int, bool, int>;  // stage, whether of backward, microbatch

  double cost(Kind kind) const {
    switch (kind) {
      case Kind::Forward:
        return costs_.forward;
      case Kind::BackwardInput:
        return costs_.backward_input;
      case Kind::BackwardWeight:
        return costs_.backward_weight;
      case Kind::Backward:
        break;
    }
    return costs_.backward_input + costs_.backward_weight;
  }

  bool try_next(size_t rank) {
    const auto& action = table_.actions[rank][next_[rank]];
    auto& clock = clocks_[rank];
    const bool is_last = action.stage + 1 == static_cast<int>(table_.stage_ranks.size());
    const bool waits = action.kind == Kind::Forward
                           ? action.stage > 0
                           : brings_input_gradient(action.kind) && !is_last;
    if (waits) {
      const bool is_backward = action.kind != Kind::Forward;
      const auto found =
          ends_.find({action.stage + (is_backward ? 1 : -1), is_backward, action.microbatch});
      if (found == ends_.end()) return false;
      clock = std::max(clock, found->second);
    }
    clock += cost(action.kind);
    busy_ += cost(action.kind);
    if (action.kind != Kind::BackwardWeight)
      ends_[{action.stage, action.kind != Kind::Forward, action.microbatch}] = clock;
    ++next_[rank];
    return true;
  }

  const PipelineTable& table_;
  PipelineCosts costs_;
  std::vector<size_t> next_;
  std::vector<double> clocks_;
  std::map<Key, double> ends_;
  double busy_ = 0;
};

/// What a stage has done with a microbatch.
struct Progress {
  bool forward = false, input = false, weight = false;
};

void take(Progress& progress, const PipelineAction& action, size_t rank) {
  const auto require = [&](bool holds, const char* why) {
    TORCH_CHECK_VALUE(holds, kVerify, ": rank ", rank, "'s ", action, " ", why);
  };
  switch (action.kind) {
    case Kind::Forward:
      require(!progress.forward, "is there twice; leave one out");
      progress.forward = true;
      return;
    case Kind::Backward:
    case Kind::BackwardInput:
      require(progress.forward, "comes before its forward; put it after F");
      require(!progress.input, "is a second backward of that microbatch; leave one out");
      progress.input = true;
      progress.weight = action.kind == Kind::Backward;
      return;
    case Kind::BackwardWeight:
      require(progress.input, "comes before the gradient of its input; put it after I");
      require(!progress.weight, "is a second one of that microbatch; leave one out");
      progress.weight = true;
      return;
  }
  require(false, "is of no known kind");
}

void check_each_action(const PipelineTable& table) {
  const auto stages = static_cast<int>(table.stage_ranks.size());
  std::map<std::pair<int, int>, Progress> done;
  for (size_t rank = 0; rank < table.actions.size(); ++rank) {
    for (const auto& action : table.actions[rank]) {
      TORCH_CHECK_VALUE(action.stage >= 0 && action.stage < stages && action.microbatch >= 0 &&
                            action.microbatch < table.microbatches,
                        kVerify, ": expected stages from 0 to ", stages - 1,
                        " and microbatches from 0 to ", table.microbatches - 1, ", got ", action,
                        " on rank ", rank);
      const int owner = table.stage_ranks[static_cast<size_t>(action.stage)];
      TORCH_CHECK_VALUE(owner == static_cast<int>(rank), kVerify, ": expected ", action,
                        " on rank ", owner, ", which has that stage, got it on rank ", rank);
      take(done[{action.stage, action.microbatch}], action, rank);
    }
  }
  for (int stage = 0; stage < stages; ++stage) {
    for (int i = 0; i < table.microbatches; ++i) {
      const auto& progress = done[{stage, i}];
      TORCH_CHECK_VALUE(progress.forward && progress.input && progress.weight, kVerify,
                        ": expected forward and backward of microbatch ", i, " at stage ", stage,
                        ", but rank ", table.stage_ranks[static_cast<size_t>(stage)], " lacks its ",
                        !progress.forward ? "F"
                        : !progress.input ? "B, or I"
                                          : "W",
                        "; every stage does every microbatch once");
    }
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const PipelineAction& action) {
  return out << action.stage << letter(action.kind) << action.microbatch;
}

std::ostream& operator<<(std::ostream& out, const PipelineTable& table) {
  for (size_t rank = 0; rank < table.actions.size(); ++rank) {
    out << "rank " << rank << ":";
    for (const auto& action : table.actions[rank]) out << " " << action;
    out << "\n";
  }
  return out;
}

void verify_pipeline_table(const PipelineTable& table) {
  const auto ranks = static_cast<int>(table.actions.size());
  TORCH_CHECK_VALUE(ranks >= 1 && table.microbatches >= 1, kVerify,
                    ": expected at least one rank and one microbatch, got ", ranks, " and ",
                    table.microbatches);
  const std::set<int> owners(table.stage_ranks.begin(), table.stage_ranks.end());
  TORCH_CHECK_VALUE(static_cast<int>(owners.size()) == ranks && *owners.begin() == 0 &&
                        *owners.rbegin() == ranks - 1,
                    kVerify, ": expected stages on each of the ", ranks, " ranks, got ",
                    table.stage_ranks.size(), " stages on ranks ",
                    c10::Join(", ", table.stage_ranks));
  check_each_action(table);
  Simulator simulator(table, {});
  TORCH_CHECK_VALUE(simulator.run(), kVerify,
                    ": the ranks wait for each other forever: ", simulator.stuck(),
                    "; let each do first what others wait for");
}

PipelineSimulation simulate_pipeline(const PipelineTable& table, PipelineCosts costs) {
  verify_pipeline_table(table);
  Simulator simulator(table, costs);
  simulator.run();
  PipelineSimulation result{.duration = simulator.duration(), .bubble_share = 0, .most_held = {}};
  const auto all = result.duration * static_cast<double>(table.actions.size());
  if (all > 0) result.bubble_share = 1 - simulator.busy() / all;
  for (const auto& actions : table.actions) {
    int held = 0;
    int most = 0;
    for (const auto& [stage, kind, microbatch] : actions) {
      if (kind == Kind::Forward) ++held;
      if (kind == Kind::Backward || kind == Kind::BackwardWeight) --held;
      most = std::max(most, held);
    }
    result.most_held.push_back(most);
  }
  return result;
}

}  // namespace tessera
