#include "compiler/passes/gradient_reductions.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <climits>
#include <map>

namespace tessera::compiler {
namespace {

std::optional<at::Scalar> divisor_of(const Node& node) {
  const Argument& divisor = node.arguments.at(1);
  if (divisor.kind != Argument::Kind::Constant) return std::nullopt;
  if (divisor.constant.isScalar()) return divisor.constant.toScalar();
  const bool is_number = divisor.constant.isTensor() && divisor.constant.toTensor().dim() == 0 &&
                         divisor.constant.toTensor().is_cpu();
  return is_number ? std::optional(divisor.constant.toTensor().item()) : std::nullopt;
}

class Finder {
 public:
  explicit Finder(const Graph& graph) : graph_(graph), memory_(graph) {
    consumers_.resize(graph.value_count());
    for (int i = 0; i < uses_.end(); ++i) {
      const Node& node = node_at(i);
      for (size_t argument = 0; argument < node.arguments.size(); ++argument) {
        if (!writes(node, argument)) continue;
        for (const ValueId value : node.arguments[argument].values) note_consumer(value, i);
      }
    }
  }

  std::vector<GradientReduction> find(const std::string& op) const {
    std::vector<GradientReduction> found;
    for (int i = 0; i < uses_.end(); ++i) {
      if (node_at(i).op != op) continue;
      if (const auto reduction = at(i)) found.push_back(*reduction);
    }
    return found;
  }

 private:
  const Node& node_at(int index) const { return graph_.nodes[static_cast<size_t>(index)]; }

  void note_consumer(ValueId value, int index) {
    if (value == kNoValue) return;
    for (const ValueId other : memory_.overlapping(value))
      consumers_[static_cast<size_t>(other)].push_back(index);
  }

  /// Whether some node from that index on, other than `except`, consumes the value's memory.
  bool is_consumed(ValueId value, int from, int except) const {
    const auto& consumers = consumers_[static_cast<size_t>(value)];
    return std::any_of(consumers.begin(), consumers.end(),
                       [&](int index) { return index >= from && index != except; });
  }

  std::optional<GradientReduction> at(int launch) const {
    const Node& node = node_at(launch);
    const ValueId input = node.used().front();
    const ValueId pending = node.defined().front();
    const auto& waits = uses_.users(pending);
    if (waits.size() != 1 || waits[0] == uses_.end() || !is_wait(node_at(waits[0])))
      return std::nullopt;
    GradientReduction reduction{
        .launch = launch, .wait = waits[0], .division = {}, .source = input};
    divide(reduction, input);
    const int from = reduction.division.value_or(launch);
    if (is_consumed(reduction.source, from, from)) return std::nullopt;
    if (!graph_.type(pending).is_contiguous()) return std::nullopt;
    reduction.ready = uses_.definition(reduction.source);
    reduction.needed = needed_at(node_at(reduction.wait).defined().front());
    return reduction;
  }

  void divide(GradientReduction& reduction, ValueId input) const {
    const int division = uses_.definition(input);
    if (division == Uses::kInput || !is_division(node_at(division))) return;
    const Node& node = node_at(division);
    const auto divisor = divisor_of(node);
    if (node.arguments[0].kind != Argument::Kind::Value) return;  // a number
    const ValueId dividend = node.used().front();
    const bool for_this_alone = uses_.users(input).size() == 1;
    if (!divisor || !for_this_alone || is_consumed(dividend, division, division)) return;
    if (!same_layout(graph_.type(dividend), graph_.type(input))) return;
    reduction.division = division;
    reduction.divisor = divisor;
    reduction.source = dividend;
  }

  /// The first node that computes with the value; those that only pass it on can come later.
  int needed_at(ValueId value) const {
    int first = uses_.end();
    std::vector<ValueId> chain = {value};
    while (!chain.empty()) {
      const ValueId next = chain.back();
      chain.pop_back();
      for (const int user : uses_.users(next)) {
        if (user == uses_.end()) continue;
        const Node& node = node_at(user);
        if (is_launch(node) || is_division(node)) {
          // It may be of the same bucket, which is sent from where the value is made.
          first = std::min(first, uses_.definition(next));
        } else if (!passes_on(node) || reads_what_is_consumed_later(node, user, next)) {
          first = std::min(first, user);
        } else {
          const auto results = node.defined();
          chain.insert(chain.end(), results.begin(), results.end());
        }
      }
    }
    return first;
  }

  /// Of a copy whose other operand will not wait for it.
  bool reads_what_is_consumed_later(const Node& node, int index, ValueId passed) const {
    const auto used = node.used();
    return std::any_of(used.begin(), used.end(), [&](ValueId value) {
      return value != passed && is_consumed(value, index, index);
    });
  }

  const Graph& graph_;
  const MemoryAnalysis memory_;
  const Uses& uses_ = memory_.uses();
  std::vector<std::vector<int>> consumers_;  // by value: nodes that consume its memory
};

/// What must agree within a bucket.
std::string key_of(const Graph& graph, const GradientReduction& reduction) {
  const Node& launch = graph.nodes[static_cast<size_t>(reduction.launch)];
  const ValueType& type = graph.type(reduction.source);
  std::string key = c10::str(type.dtype, " on ", type.device);
  if (reduction.divisor) {
    key += " / " + text_of_constant(c10::IValue(*reduction.divisor), *c10::NumberType::get());
  }
  for (size_t i = 1; i < launch.arguments.size(); ++i)
    key += ", " + text_of_constant(launch.arguments[i].constant, *c10::AnyType::get());
  return key;
}

/// Fills buckets of one key.
class Stream {
 public:
  explicit Stream(const Graph& graph, const BucketCaps& caps) : graph_(graph), fill_(fill(caps)) {}

  void add(const GradientReduction& reduction) {
    // Nobody may need a result before the last one can be sent.
    const int ready = std::max(ready_, reduction.ready);
    const int needed = std::min(needed_, reduction.needed);
    if (!open_.empty() && needed <= ready) close();
    ready_ = std::max(ready_, reduction.ready);
    needed_ = std::min(needed_, reduction.needed);
    open_.push_back(reduction);
    if (fill_.add(static_cast<size_t>(graph_.type(reduction.source).bytes()))) close();
  }

  void close() {
    if (open_.empty()) return;
    if (open_.size() > 1 || open_.front().division) closed_.push_back(std::move(open_));
    open_.clear();
    fill_.close();
    ready_ = Uses::kInput;
    needed_ = INT_MAX;
  }

  const std::vector<GradientBucket>& closed() const { return closed_; }

 private:
  const Graph& graph_;
  detail::replicate::BucketFill fill_;
  int ready_ = Uses::kInput;
  int needed_ = INT_MAX;
  GradientBucket open_;
  std::vector<GradientBucket> closed_;
};

}  // namespace

std::vector<GradientReduction> find_reductions(const Graph& graph, const std::string& op) {
  return Finder(graph).find(op);
}

detail::replicate::BucketFill fill(const BucketCaps& caps) {
  static_assert(BucketCaps{}.first == detail::replicate::kDefaultLimits.first &&
                BucketCaps{}.later == detail::replicate::kDefaultLimits.rest);
  return detail::replicate::BucketFill(
      {.first = static_cast<size_t>(caps.first), .rest = static_cast<size_t>(caps.later)});
}

std::optional<int64_t> ranks_of(const std::string& group) {
  try {
    return c10d::resolve_process_group(group)->getSize();
  } catch (const c10::Error&) {
    return std::nullopt;  // a graph that was read from a file
  }
}

int ready_behind(const GradientBucket& bucket) {
  int ready = Uses::kInput;
  for (const GradientReduction& each : bucket) ready = std::max(ready, each.ready);
  return ready;
}

std::vector<GradientBucket> assign_buckets(const Graph& graph,
                                           const std::vector<GradientReduction>& reductions,
                                           const Caps& caps) {
  std::map<std::string, Stream> streams;
  for (const GradientReduction& each : reductions) {
    const auto& own = graph.nodes[static_cast<size_t>(each.launch)].bucket_caps;
    const auto used = caps ? *caps : own.value_or(BucketCaps{});
    // Gradients of modules with different caps don't share a bucket.
    const auto key = c10::str(key_of(graph, each), ", ", used.first, ", ", used.later);
    streams.try_emplace(key, graph, used).first->second.add(each);
  }
  std::vector<GradientBucket> buckets;
  for (auto& [key, stream] : streams) {
    stream.close();
    buckets.insert(buckets.end(), stream.closed().begin(), stream.closed().end());
  }
  std::sort(buckets.begin(), buckets.end(),
            [](const GradientBucket& left, const GradientBucket& right) {
              return left.front().launch < right.front().launch;
            });
  return buckets;
}

}  // namespace tessera::compiler
