// Note [buckets]. Replicated gradients arrive one by one, each with a division, an all-reduce and a
// wait. A bucket replaces these by one collective, behind the node that makes the last of its
// gradients:
//
//   g1 -> div -> all_reduce -> wait ->            g1 \                              / wait ->
//   ...                                    =>         > div -> all_reduce_coalesced
//   g2 -> div -> all_reduce -> wait ->            g2 /                              \ wait ->
//
// or, by concat, flatten each, join, divide, reduce, wait, split and view. Waits that came before
// the last gradient, and what only passes their results on, move behind the collective.
#include <tessera/compile/pass.h>

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/ir/text.h"
#include "compiler/passes/gradient_reductions.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera::compiler {
namespace {

/// Arguments of the launch behind its tensors: reduction, group.
std::vector<Argument> launch_arguments(Argument tensors, const Node& launch) {
  std::vector<Argument> arguments = {std::move(tensors)};
  arguments.insert(arguments.end(), launch.arguments.begin() + 1, launch.arguments.end());
  return arguments;
}

constexpr const char* kAllReduces = "_c10d_functional::all_reduce_coalesced";
constexpr int64_t kLargeBytes = int64_t{256} << 10;

class Bucketer {
 public:
  explicit Bucketer(Graph& graph) : graph_(graph), removed_(graph.nodes.size()) {}

  void coalesce(const GradientBucket& bucket, const std::string& op) {
    const int place = ready_behind(bucket);
    const Node& launch = node_at(bucket.front().launch);
    std::vector<ValueId> sources, divided, pending;
    for (const GradientReduction& each : bucket) {
      sources.push_back(each.source);
      divided.push_back(node_at(each.launch).used().front());
      pending.push_back(node_at(each.launch).defined().front());
    }
    if (bucket.front().divisor) {
      add(place,
          make_node("aten::_foreach_div.Scalar",
                    {Argument::of(sources), Argument::of(c10::IValue(*bucket.front().divisor))},
                    {Argument::of(divided)}));
    }
    const Argument input = Argument::of(bucket.front().divisor ? divided : sources);
    add_launch(place, bucket,
               make_node(op, launch_arguments(input, launch), {Argument::of(pending)}));
    for (const GradientReduction& each : bucket) drop(each);
  }

  /// Small ones joined, large ones each where they lie: a copy costs more than a message of its
  /// own.
  void by_size(const GradientBucket& bucket) {
    GradientBucket small, large;
    for (const GradientReduction& each : bucket)
      (graph_.type(each.source).bytes() < kLargeBytes ? small : large).push_back(each);
    if (!small.empty()) concat(small);
    if (large.empty()) return;
    averages(large) ? average(large) : coalesce(large, kAllReduces);
  }

  void concat(const GradientBucket& bucket) {
    const int place = ready_behind(bucket);
    const Node& launch = node_at(bucket.front().launch);
    std::vector<ValueId> flat, pieces;
    std::vector<int64_t> sizes;
    ValueType whole = graph_.type(bucket.front().source);
    whole.placement.reset();
    int64_t total = 0;
    for (const GradientReduction& each : bucket) {
      sizes.push_back(graph_.type(each.source).numel());
      total += sizes.back();
      flat.push_back(add_vector(whole, sizes.back()));
      pieces.push_back(add_vector(whole, sizes.back()));
      add(place, make_node("aten::flatten.using_ints", {Argument::of(each.source)},
                           {Argument::of(flat.back())}));
    }
    ValueId joined = add_step(place, "aten::cat", {Argument::of(flat)}, whole, total);
    if (bucket.front().divisor) {
      joined = add_step(place, "aten::div.Scalar",
                        {Argument::of(joined), Argument::of(c10::IValue(*bucket.front().divisor))},
                        whole, total);
    }
    const ValueId sent = std::exchange(joined, add_vector(whole, total));
    add_launch(
        place, bucket,
        make_node(launch.op, launch_arguments(Argument::of(sent), launch), {Argument::of(joined)}));
    joined = add_step(place, node_at(bucket.front().wait).op, {Argument::of(joined)}, whole, total);
    add(place, make_node("aten::split_with_sizes",
                         {Argument::of(joined), Argument::of(c10::IValue(sizes))},
                         {Argument::of(pieces)}));
    for (size_t i = 0; i < bucket.size(); ++i) {
      const ValueId result = node_at(bucket[i].wait).defined().front();
      add(place,
          make_node("aten::view",
                    {Argument::of(pieces[i]), Argument::of(c10::IValue(graph_.type(result).sizes))},
                    {Argument::of(result)}));
      removed_[static_cast<size_t>(bucket[i].wait)] = true;
      drop(bucket[i]);
    }
  }

  /// Whether the division is by the number of ranks, so that collectives can do it.
  bool averages(const GradientBucket& bucket) const {
    const Node& launch = node_at(bucket.front().launch);
    if (!bucket.front().divisor || launch.arguments[1].constant.toStringRef() != "sum")
      return false;
    const auto ranks = ranks_of(launch.arguments[2].constant.toStringRef());
    return ranks && bucket.front().divisor->toDouble() == static_cast<double>(*ranks);
  }

  void average(const GradientBucket& bucket) {
    std::vector<ValueId> sources, pending;
    for (const GradientReduction& each : bucket) {
      sources.push_back(each.source);
      pending.push_back(node_at(each.launch).defined().front());
    }
    auto arguments = launch_arguments(Argument::of(sources), node_at(bucket.front().launch));
    arguments[1] = Argument::of(c10::IValue("avg"));
    add_launch(ready_behind(bucket), bucket,
               make_node(kAllReduces, std::move(arguments), {Argument::of(pending)}));
    for (const GradientReduction& each : bucket) drop(each);
  }

  void finish() {
    // Indices of what is put in count all nodes, so those to remove stay until then, without uses.
    for (size_t i = 0; i < removed_.size(); ++i) {
      if (removed_[i]) graph_.nodes[i] = Node{};
    }
    insert_nodes(graph_, std::move(added_));
    std::vector<bool> empty;
    for (const Node& node : graph_.nodes) empty.push_back(node.op.empty());
    remove_nodes(graph_, empty);
  }

 private:
  const Node& node_at(int index) const { return graph_.nodes[static_cast<size_t>(index)]; }

  void add(int place, Node node) { added_.emplace_back(place, std::move(node)); }

  void add_launch(int place, const GradientBucket& bucket, Node node) {
    for (const GradientReduction& each : bucket) {
      const auto& own = node_at(each.launch).messages;
      node.messages.insert(node.messages.end(), own.begin(), own.end());
    }
    add(place, std::move(node));
  }

  void drop(const GradientReduction& reduction) {
    removed_[static_cast<size_t>(reduction.launch)] = true;
    if (reduction.division) removed_[static_cast<size_t>(*reduction.division)] = true;
  }

  ValueId add_vector(const ValueType& like, int64_t size) {
    return graph_.add_value(
        {.dtype = like.dtype, .device = like.device, .sizes = {size}, .strides = {1}});
  }

  ValueId add_step(int place, const std::string& op, std::vector<Argument> arguments,
                   const ValueType& like, int64_t size) {
    const ValueId result = add_vector(like, size);
    add(place, make_node(op, std::move(arguments), {Argument::of(result)}));
    return result;
  }

  Graph& graph_;
  std::vector<bool> removed_;
  std::vector<std::pair<int, Node>> added_;
};

std::vector<GradientBucket> buckets_of(const Graph& graph, const char* op, const Caps& caps) {
  return assign_buckets(graph, find_reductions(graph, op), caps);
}

template <class Replace>
void replace_all_reduces(Graph& graph, const Caps& caps, Replace replace) {
  const auto buckets = buckets_of(graph, "_c10d_functional::all_reduce", caps);
  // A pass that finds nothing left to do leaves those of one before it.
  if (!buckets.empty()) counters()["ddp_buckets"] = static_cast<int64_t>(buckets.size());
  Bucketer bucketer(graph);
  for (const GradientBucket& bucket : buckets) replace(bucketer, bucket);
  bucketer.finish();
}

}  // namespace

void bucket_all_reduces(Graph& graph, const Caps& caps) {
  replace_all_reduces(graph, caps, [](Bucketer& bucketer, const GradientBucket& bucket) {
    bucketer.coalesce(bucket, kAllReduces);
  });
}

void bucket_all_reduces_by_concat(Graph& graph, const Caps& caps) {
  replace_all_reduces(graph, caps, [](Bucketer& bucketer, const GradientBucket& bucket) {
    bucketer.concat(bucket);
  });
}

void bucket_all_reduces_by_size(Graph& graph, const Caps& caps) {
  replace_all_reduces(graph, caps, [](Bucketer& bucketer, const GradientBucket& bucket) {
    bucketer.by_size(bucket);
  });
}

void bucket_reduce_scatters(Graph& graph, const Caps& caps) {
  Bucketer bucketer(graph);
  for (const GradientBucket& bucket :
       buckets_of(graph, "_c10d_functional::reduce_scatter_tensor", caps))
    bucketer.coalesce(bucket, "_c10d_functional::reduce_scatter_tensor_coalesced");
  bucketer.finish();
}

namespace {

/// Gathers that are sent together, by index of their nodes: where the first of them stood, since
/// the results are needed one after the other from there on.
using Gathers = std::vector<int>;

/// What must agree: dtype, device, number of ranks and group.
std::string key_of(const Graph& graph, const Node& launch) {
  const ValueType& type = graph.type(launch.used().front());
  return c10::str(type.dtype, " on ", type.device, ", ",
                  text_of_constant(launch.arguments[1].constant, *c10::AnyType::get()), ", ",
                  text_of_constant(launch.arguments[2].constant, *c10::AnyType::get()));
}

/// Whether a gather is waited for once, so that it may be one of several.
bool is_waited_for(const Graph& graph, const Uses& uses, const Node& launch) {
  const auto& users = uses.users(launch.defined().front());
  return users.size() == 1 && users[0] != uses.end() &&
         is_wait(graph.nodes[static_cast<size_t>(users[0])]);
}

std::vector<Gathers> assign(const Graph& graph, const BucketCaps& caps) {
  const Uses uses(graph);
  std::map<std::string, std::pair<Gathers, detail::replicate::BucketFill>> open;
  std::vector<Gathers> closed;
  for (int i = 0; i < uses.end(); ++i) {
    const Node& node = graph.nodes[static_cast<size_t>(i)];
    if (node.op != "_c10d_functional::all_gather_into_tensor" || !is_waited_for(graph, uses, node))
      continue;
    auto& [gathers, fill_of] =
        open.try_emplace(key_of(graph, node), Gathers{}, fill(caps)).first->second;
    const bool exists_in_time =
        gathers.empty() || uses.definition(node.used().front()) < gathers.front();
    if (!exists_in_time) {
      closed.push_back(std::exchange(gathers, {}));
      fill_of.close();
    }
    gathers.push_back(i);
    if (fill_of.add(static_cast<size_t>(graph.type(node.defined().front()).bytes())))
      closed.push_back(std::exchange(gathers, {}));
  }
  for (auto& [key, rest] : open) closed.push_back(std::move(rest.first));
  std::erase_if(closed, [](const Gathers& each) { return each.size() < 2; });
  return closed;
}

}  // namespace

void bucket_all_gathers(Graph& graph, const Caps& caps) {
  std::vector<bool> removed(graph.nodes.size());
  for (const Gathers& gathers : assign(graph, caps.value_or(BucketCaps{}))) {
    std::vector<ValueId> inputs, results;
    std::vector<int64_t> messages;
    for (const int launch : gathers) {
      const Node& node = graph.nodes[static_cast<size_t>(launch)];
      inputs.push_back(node.used().front());
      results.push_back(node.defined().front());
      messages.insert(messages.end(), node.messages.begin(), node.messages.end());
      removed[static_cast<size_t>(launch)] = launch != gathers.front();
    }
    Node& first = graph.nodes[static_cast<size_t>(gathers.front())];
    first.op = "_c10d_functional::all_gather_into_tensor_coalesced";
    first.arguments[0] = Argument::of(std::move(inputs));
    first.results = {Argument::of(std::move(results))};
    first.messages = std::move(messages);
  }
  remove_nodes(graph, removed);
}

}  // namespace tessera::compiler
