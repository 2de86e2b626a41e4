// The tables of the schedules.
#include <tessera/pipeline.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <ostream>
#include <tuple>

namespace tessera {
namespace {

using Kind = PipelineAction::Kind;
using Actions = std::vector<PipelineAction>;

constexpr const char* kCaller = "make_pipeline_table";

Actions all_then_all(int stage, int microbatches) {
  Actions actions;
  for (const auto kind : {Kind::Forward, Kind::Backward}) {
    for (int i = 0; i < microbatches; ++i) actions.push_back({stage, kind, i});
  }
  return actions;
}

Actions one_by_one(int rank, int ranks, int microbatches) {
  Actions actions;
  const int warm_up = std::min(microbatches, ranks - rank);
  for (int i = 0; i < warm_up; ++i) actions.push_back({rank, Kind::Forward, i});
  for (int i = 0; i < microbatches; ++i) {
    actions.push_back({rank, Kind::Backward, i});
    if (i + warm_up < microbatches) actions.push_back({rank, Kind::Forward, i + warm_up});
  }
  return actions;
}

/// Microbatches go round the ranks in rounds: as many as fill the pipe at the first stage of each
/// rank, then the same at the second, …
Actions interleaved(int rank, int ranks, int microbatches, int per_rank) {
  const int rounds = std::max(1, microbatches / ranks);
  TORCH_CHECK_VALUE(microbatches % rounds == 0, kCaller,
                    ": expected microbatches that make up whole rounds for Interleaved1F1B, got ",
                    microbatches, " for ", ranks, " ranks; take a multiple of ", ranks);
  const int in_round = microbatches / rounds;
  const int count = microbatches * per_rank;
  const auto nth = [&](int n, Kind kind) -> PipelineAction {
    const int turn = n / in_round % per_rank;
    const int local = kind == Kind::Forward ? turn : per_rank - 1 - turn;
    return {local * ranks + rank, kind, n / (in_round * per_rank) * in_round + n % in_round};
  };
  const int warm_up = std::min(count, (per_rank - 1) * in_round + 2 * (ranks - 1 - rank));
  Actions actions;
  for (int n = 0; n < warm_up; ++n) actions.push_back(nth(n, Kind::Forward));
  for (int n = 0; n < count; ++n) {
    if (n + warm_up < count) actions.push_back(nth(n + warm_up, Kind::Forward));
    actions.push_back(nth(n, Kind::Backward));
  }
  return actions;
}

/// As one_by_one; rank r is r microbatches late with gradients of weights, which fill its end.
Actions zero_bubble(int rank, int ranks, int microbatches) {
  Actions actions;
  const int warm_up = std::min(microbatches, ranks - rank);
  for (int i = 0; i < warm_up; ++i) actions.push_back({rank, Kind::Forward, i});
  for (int i = 0; i < microbatches; ++i) {
    actions.push_back({rank, Kind::BackwardInput, i});
    if (i >= rank) actions.push_back({rank, Kind::BackwardWeight, i - rank});
    if (i + warm_up < microbatches) actions.push_back({rank, Kind::Forward, i + warm_up});
  }
  for (int i = std::max(0, microbatches - rank); i < microbatches; ++i)
    actions.push_back({rank, Kind::BackwardWeight, i});
  return actions;
}

/// The way down and up of ZB-V, by a clock: each rank does what can be done, gradients of inputs
/// first, forwards while it holds less than one stage's ranks twice, gradients of weights
/// otherwise.
class VShape {
 public:
  VShape(int ranks, int microbatches)
      : ranks_(ranks), microbatches_(microbatches), next_(static_cast<size_t>(2 * ranks)) {}

  std::vector<Actions> make() {
    std::vector<Actions> actions(static_cast<size_t>(ranks_));
    for (size_t done = 0; done < static_cast<size_t>(6 * ranks_ * microbatches_);) {
      std::vector<PipelineAction> started;
      for (int rank = 0; rank < ranks_; ++rank) {
        if (const auto action = choose(rank)) {
          actions[static_cast<size_t>(rank)].push_back(*action);
          started.push_back(*action);
        }
      }
      TORCH_INTERNAL_ASSERT(!started.empty());
      // What begins at one tick is there for others at the next.
      for (const auto& action : started) ++count(action.stage, action.kind);
      done += started.size();
    }
    return actions;
  }

 private:
  static size_t row(Kind kind) {
    return kind == Kind::Forward ? 0 : kind == Kind::BackwardInput ? 1 : 2;
  }
  int& count(int stage, Kind kind) { return next_[static_cast<size_t>(stage)][row(kind)]; }

  bool is_ready(int stage, Kind kind) {
    const int i = count(stage, kind);
    if (i >= microbatches_) return false;
    if (kind == Kind::Forward) return stage == 0 || count(stage - 1, kind) > i;
    if (kind == Kind::BackwardWeight) return count(stage, Kind::BackwardInput) > i;
    return count(stage, Kind::Forward) > i &&
           (stage + 1 == 2 * ranks_ || count(stage + 1, kind) > i);
  }

  std::optional<PipelineAction> choose(int rank) {
    const std::array stages{2 * ranks_ - 1 - rank, rank};
    int held = 0;
    for (const int stage : stages)
      held += count(stage, Kind::Forward) - count(stage, Kind::BackwardWeight);
    for (const auto kind : {Kind::BackwardInput, Kind::Forward, Kind::BackwardWeight}) {
      for (const int stage : stages) {
        // A place stays free for the way up, or what is on the way down could not go on.
        const int most = 2 * ranks_ - (stage == rank ? 1 : 0);
        if ((kind != Kind::Forward || held < most) && is_ready(stage, kind))
          return PipelineAction{stage, kind, count(stage, kind)};
      }
    }
    return std::nullopt;
  }

  int ranks_;
  int microbatches_;
  std::vector<std::array<int, 3>> next_;  // by stage, of each kind
};

int stages_per_rank_of(PipelineSchedule schedule, int given) {
  const bool is_v = schedule == PipelineSchedule::ZBVZeroBubble;
  const bool is_interleaved = schedule == PipelineSchedule::Interleaved1F1B;
  const int own = is_v || is_interleaved ? 2 : 1;
  TORCH_CHECK_VALUE(given == 0 || given == own || (is_interleaved && given > 0), kCaller,
                    ": expected ", is_interleaved ? "at least 1" : std::to_string(own),
                    " for stages_per_rank of ", schedule, ", got ", given,
                    is_interleaved ? "" : "; for others take Interleaved1F1B");
  return given == 0 ? own : given;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::GPipe:
      return out << "GPipe";
    case PipelineSchedule::OneFOneB:
      return out << "OneFOneB";
    case PipelineSchedule::Interleaved1F1B:
      return out << "Interleaved1F1B";
    case PipelineSchedule::ZeroBubble:
      return out << "ZeroBubble";
    case PipelineSchedule::ZBVZeroBubble:
      return out << "ZBVZeroBubble";
  }
  return out << "PipelineSchedule(" << static_cast<int>(schedule) << ")";
}

PipelineTable make_pipeline_table(PipelineSchedule schedule, int ranks, int microbatches,
                                  int stages_per_rank) {
  TORCH_CHECK_VALUE(ranks >= 1, kCaller, ": expected at least 1 rank, got ", ranks);
  TORCH_CHECK_VALUE(microbatches >= 1, kCaller, ": expected at least 1 microbatch, got ",
                    microbatches, "; with fewer than there are ranks some are always idle");
  const int per_rank = stages_per_rank_of(schedule, stages_per_rank);
  PipelineTable table{.microbatches = microbatches, .stage_ranks = {}, .actions = {}};
  for (int stage = 0; stage < ranks * per_rank; ++stage) {
    const bool is_way_up = schedule == PipelineSchedule::ZBVZeroBubble && stage >= ranks;
    table.stage_ranks.push_back(is_way_up ? 2 * ranks - 1 - stage : stage % ranks);
  }
  if (schedule == PipelineSchedule::ZBVZeroBubble) {
    table.actions = VShape(ranks, microbatches).make();
    return table;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    table.actions.push_back(schedule == PipelineSchedule::GPipe ? all_then_all(rank, microbatches)
                            : schedule == PipelineSchedule::OneFOneB
                                ? one_by_one(rank, ranks, microbatches)
                            : schedule == PipelineSchedule::ZeroBubble
                                ? zero_bubble(rank, ranks, microbatches)
                                : interleaved(rank, ranks, microbatches, per_rank));
  }
  return table;
}

}  // namespace tessera
