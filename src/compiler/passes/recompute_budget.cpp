// Note [memory budget]. The peak is that of the program as it will be run: the passes behind this
// one are run on a copy of the graph (plan_of), and memory is looked at node by node (Lifetimes).
// What lies in memory during the peak without being needed there, was made before it and is read
// after it, may be computed again behind it, with all that is not there by then. Of these chains
// the ones that free most bytes for those they move come first, and with matrix products in them
// only if there are no others. Then the peak is found anew, perhaps elsewhere, until it fits.
// Nothing here depends on the rank but sizes, so ranks of equal batches make equal programs.
#include "base/text.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/kernels/buffers.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/recompute.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <tuple>

namespace tessera::compiler {
namespace {

constexpr size_t kMostCopies = 24;    // for one value
constexpr int64_t kMostRounds = 400;  // of finding the peak anew
constexpr int64_t kSmallShare = 8;    // what is that much smaller is kept to make a value of it
constexpr size_t kMostNamed = 3;

/// By node of `graph`: the node of the program that computes it. Inside of a kernel that is the one
/// that makes what follows from it.
std::vector<size_t> times_of(const Graph& graph, const Graph& program) {
  std::vector<size_t> made(program.value_count(), SIZE_MAX);
  for (size_t i = 0; i < program.nodes.size(); ++i) {
    for (const ValueId value : program.nodes[i].defined()) made[static_cast<size_t>(value)] = i;
  }
  const Uses uses(graph);
  std::vector<size_t> times(graph.nodes.size(), program.nodes.size());
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    for (const ValueId value : graph.nodes[i].defined()) {
      if (made[static_cast<size_t>(value)] != SIZE_MAX) {
        times[i] = std::min(times[i], made[static_cast<size_t>(value)]);
        continue;
      }
      for (const int user : uses.users(value)) {
        if (user != uses.end()) times[i] = std::min(times[i], times[static_cast<size_t>(user)]);
      }
    }
  }
  return times;
}

/// A way to hold less at the peak.
struct Candidate {
  RecomputeChain chain = {};
  ValueId value = kNoValue;  // the first in its memory
  int64_t freed = 0;         // at the peak
  double moved = 0;          // bytes, by the copies
  bool multiplies = false;   // copies a matrix product

  double gain() const { return static_cast<double>(freed) / std::max(moved, 1.0); }
};

/// What could be computed again for a plan, and its chains.
class Round {
 public:
  Round(const Graph& graph, const Planned& planned, const std::set<ValueId>& done)
      : graph_(graph),
        lifetimes_(planned.lifetimes),
        done_(done),
        memory_(graph),
        finder_(graph, memory_),
        times_(times_of(graph, planned.program)),
        peak_(planned.lifetimes.peak),
        values_(lifetimes_.buffers.size()) {
    for (size_t i = 0; i < graph.value_count(); ++i) {
      if (lifetimes_.buffer_of[i] != Lifetimes::kNone)
        values_[lifetimes_.buffer_of[i]].push_back(static_cast<ValueId>(i));
    }
  }

  /// Best first.
  std::vector<Candidate> candidates() const {
    std::vector<Candidate> found;
    for (size_t i = 0; i < lifetimes_.buffers.size(); ++i) {
      const Lifetime& buffer = lifetimes_.buffers[i];
      if (buffer.is_input || buffer.first >= peak_ || buffer.last <= peak_ || buffer.bytes == 0)
        continue;
      for (const bool multiplies : {false, true}) {
        auto candidate = candidate_of(i, multiplies);
        if (!candidate) continue;
        found.push_back(std::move(*candidate));
        break;
      }
    }
    std::ranges::sort(found, [](const Candidate& left, const Candidate& right) {
      const auto rank = [](const Candidate& each) {
        return std::tuple(each.multiplies, -each.gain(), each.value);
      };
      return rank(left) < rank(right);
    });
    return found;
  }

  /// The first of them that together free `bytes`, as far as they do not get in each other's way.
  std::vector<Candidate> choose(const std::vector<Candidate>& candidates, int64_t bytes) const {
    std::vector<Candidate> chosen;
    std::set<size_t> recomputed, read;  // memories
    for (const Candidate& each : candidates) {
      if (bytes <= 0) break;
      // Products wait for the next round: a cheaper way may be left there.
      if (each.multiplies && !chosen.empty()) break;
      const auto is_recomputed = [&](ValueId leaf) {
        return recomputed.contains(memory_.memory(leaf));
      };
      if (read.contains(memory_.memory(each.value)) ||
          std::ranges::any_of(each.chain.leaves, is_recomputed))
        continue;
      recomputed.insert(memory_.memory(each.value));
      for (const ValueId leaf : each.chain.leaves) read.insert(memory_.memory(leaf));
      bytes -= each.freed;
      chosen.push_back(each);
    }
    return chosen;
  }

 private:
  bool is_cheap(const Node& node) const {
    return is_view(node) || is_pointwise(node) || is_copy(node) || computes_rows(node) ||
           pointwise_rule(graph_, node) || needs_rows(graph_, node);
  }

  size_t time_of(int node) const { return times_[static_cast<size_t>(node)]; }

  /// The one value of the buffer, views of it apart, that is read behind the peak; none if there
  /// are several, or if it can't be given up.
  ValueId late_value(size_t buffer) const {
    ValueId found = kNoValue;
    for (const ValueId value : values_[buffer]) {
      if (is_early(value)) continue;
      if (found != kNoValue && memory_.memory(found) != memory_.memory(value)) return kNoValue;
      found = found == kNoValue ? value : found;
    }
    if (found == kNoValue || !memory_.inputs(found).empty()) return kNoValue;
    return memory_.neighbours(found).front();
  }

  /// Whether nothing reads it behind the peak.
  bool is_early(ValueId value) const {
    return std::ranges::all_of(memory_.uses().users(value), [&](int user) {
      return user != memory_.uses().end() && time_of(user) <= peak_;
    });
  }

  /// The nodes behind the peak that read the memory of `value`, and what they read there. None if
  /// one can't be given a copy.
  std::optional<RecomputeChain> late_users(ValueId value) const {
    RecomputeChain chain;
    const auto& values = memory_.neighbours(value);
    for (const ValueId each : values) {
      const int made = memory_.uses().definition(each);
      if (done_.contains(each) || !finder_.is_private(each)) return std::nullopt;
      // A view that is made late is a user by itself.
      if (made == Uses::kInput || time_of(made) > peak_) continue;
      for (const int user : memory_.uses().users(each)) {
        if (time_of(user) == peak_) return std::nullopt;
        if (time_of(user) < peak_) continue;
        if (static_cast<size_t>(user) >= finder_.mark()) return std::nullopt;
        chain.users.push_back(static_cast<size_t>(user));
        if (chain.values.empty() || chain.values.back() != each) chain.values.push_back(each);
      }
    }
    if (chain.users.empty()) return std::nullopt;
    std::ranges::sort(chain.users);
    const auto [first, last] = std::ranges::unique(chain.users);
    chain.users.erase(first, last);
    chain.at = chain.users.front();
    return chain;
  }

  std::optional<Candidate> candidate_of(size_t buffer, bool multiplies) const {
    const ValueId value = late_value(buffer);
    if (value == kNoValue) return std::nullopt;
    auto chain = late_users(value);
    if (!chain) return std::nullopt;
    Candidate candidate{.value = value, .freed = lifetimes_.buffers[buffer].bytes};
    std::set<size_t> kept;  // buffers that are held over the peak for it
    const auto is_there = [&](ValueId used) {
      if (!memory_.inputs(used).empty()) return true;
      const size_t other = lifetimes_.buffer_of[static_cast<size_t>(used)];
      if (other == Lifetimes::kNone || other == buffer) return false;
      const Lifetime& life = lifetimes_.buffers[other];
      if (life.last >= peak_) return true;
      if (life.bytes > candidate.freed / kSmallShare) return false;
      if (kept.insert(other).second) candidate.freed -= life.bytes;
      return true;
    };
    const auto may_copy = [&](const Node& node) {
      return is_cheap(node) || (multiplies && multiplies_matrices(node));
    };
    for (const ValueId each : chain->values) {
      if (!finder_.extend(*chain, each, is_there, may_copy, kMostCopies)) return std::nullopt;
    }
    if (candidate.freed <= 0) return std::nullopt;
    for (const size_t node : chain->nodes) add_cost(candidate, graph_.nodes[node]);
    candidate.chain = std::move(*chain);
    return candidate;
  }

  void add_cost(Candidate& candidate, const Node& node) const {
    candidate.moved += static_cast<double>(bytes_moved(graph_, node));
    if (!multiplies_matrices(node)) return;
    candidate.multiplies = true;
    // Devices multiply and add some 100 numbers in the time of a byte, more or less.
    constexpr double kPerByte = 100;
    const auto used = node.used();
    const double inner = static_cast<double>(
        graph_.type(used.back()).sizes.at(graph_.type(used.back()).sizes.size() - 2));
    candidate.moved +=
        static_cast<double>(graph_.type(node.defined()[0]).numel()) * inner / kPerByte;
  }

  const Graph& graph_;
  const Lifetimes& lifetimes_;
  const std::set<ValueId>& done_;
  const MemoryAnalysis memory_;
  const ChainFinder finder_;
  const std::vector<size_t> times_;
  const size_t peak_;
  std::vector<std::vector<ValueId>> values_;  // by buffer
};

/// Looks for a graph whose peak is within the budget.
class BudgetSearch {
 public:
  BudgetSearch(Graph graph, bool fuses)
      : graph_(std::move(graph)), fuses_(fuses), planned_(plan_of(graph_, fuses)) {
    first_traffic_ = planned_.traffic;
    best_ = {graph_, {}, planned_.lifetimes.peak_bytes};
  }

  struct Found {
    Graph graph;
    Recomputation recomputed;
    int64_t peak_bytes = 0;
  };

  /// The graph with the lowest peak that was found.
  Found run(int64_t budget) {
    for (int64_t i = 0; i < kMostRounds && peak() > budget; ++i) {
      const Round round(graph_, planned_, done_);
      const auto candidates = round.candidates();
      if (candidates.empty()) break;
      const auto chosen = round.choose(candidates, peak() - budget);
      if (take(chosen) || (chosen.size() > 1 && take({candidates.front()}))) continue;
      done_.insert(candidates.front().value);
    }
    return std::move(best_);
  }

 private:
  int64_t peak() const { return planned_.lifetimes.peak_bytes; }

  /// False, and nothing has changed, if the peak would rise. It may stay as it is, at another node.
  bool take(const std::vector<Candidate>& chosen) {
    Graph trial = graph_;
    std::vector<RecomputeChain> chains;
    for (const Candidate& each : chosen) chains.push_back(each.chain);
    const auto made = insert_copies(trial, chains);
    Planned planned = plan_of(trial, fuses_);
    if (planned.lifetimes.peak_bytes > peak()) return false;
    for (const Candidate& each : chosen) {
      done_.insert(each.value);
      ++recomputed_.values;
      recomputed_.bytes += each.freed;
    }
    for (const auto& copies : made) done_.insert(copies.begin(), copies.end());
    graph_ = std::move(trial);
    planned_ = std::move(planned);
    recomputed_.added_traffic = planned_.traffic - first_traffic_;
    if (peak() < best_.peak_bytes) best_ = {graph_, recomputed_, peak()};
    return true;
  }

  Graph graph_;
  const bool fuses_;
  Planned planned_;
  std::set<ValueId> done_;  // neither these nor copies are computed again
  Recomputation recomputed_;
  int64_t first_traffic_ = 0;
  Found best_;
};

/// The largest buffers at the peak, for a message.
std::string holders_at_peak(const Planned& planned) {
  const auto& [program, lifetimes, traffic] = planned;
  std::vector<Lifetime> held;
  for (const Lifetime& each : lifetimes.buffers) {
    if (!each.is_input && each.first <= lifetimes.peak && each.last >= lifetimes.peak)
      held.push_back(each);
  }
  std::ranges::stable_sort(held, std::greater(), &Lifetime::bytes);
  std::string text;
  for (size_t i = 0; i < std::min(held.size(), kMostNamed); ++i) {
    const Node& node = program.nodes[held[i].first];
    text += c10::str(i == 0 ? "" : ", ", format_bytes(static_cast<size_t>(held[i].bytes)), " %",
                     held[i].value, ": ", text_of(program.type(held[i].value)), " of ", node.op,
                     node.module.empty() ? "" : " in " + node.module);
  }
  return text;
}

}  // namespace

MemoryReport fit_to_budget(Graph& graph, std::optional<int64_t> budget, bool fuses) {
  MemoryReport report;
  if (fuses) report.recomputed = recompute_in_kernels(graph);
  if (!budget) return report;
  auto found = BudgetSearch(graph, fuses).run(*budget);
  graph = std::move(found.graph);
  report.recomputed.values += found.recomputed.values;
  report.recomputed.bytes += found.recomputed.bytes;
  report.recomputed.added_traffic += found.recomputed.added_traffic;
  if (found.peak_bytes > *budget) report.held_by = holders_at_peak(plan_of(graph, fuses));
  return report;
}

}  // namespace tessera::compiler
