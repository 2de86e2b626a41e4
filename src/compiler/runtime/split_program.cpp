#include "compiler/runtime/split_program.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/record/dispatch_key.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <utility>

namespace tessera::compiler {
namespace {

std::set<ValueId> defined_by(const std::vector<Node>& nodes) {
  std::set<ValueId> defined;
  for (const Node& node : nodes) {
    for (const ValueId value : node.defined()) defined.insert(value);
  }
  return defined;
}

}  // namespace

SplitProgram::Parts SplitProgram::split(const Graph& graph, size_t mark) {
  Parts parts{graph, graph, {}, {}};
  auto& [first, rest, is_late, sources] = parts;
  const auto at_mark = graph.nodes.begin() + static_cast<long>(mark);
  first.nodes.assign(graph.nodes.begin(), at_mark);
  rest.nodes.assign(at_mark + 1, graph.nodes.end());
  first.outputs.clear();
  rest.outputs.clear();
  rest.inputs.clear();
  const auto made_late = defined_by(rest.nodes);
  std::set<ValueId> written;
  for (const GraphOutput& output : graph.outputs) {
    is_late.push_back(made_late.contains(output.value));
    (is_late.back() ? rest : first).outputs.push_back(output);
    if (is_late.back() && output.kind == OutputKind::Write) written.insert(output.target);
  }
  auto needed = written;
  for (const Node& node : rest.nodes) {
    for (const ValueId value : node.used()) {
      if (!made_late.contains(value)) needed.insert(value);
    }
  }
  size_t carried = 0;
  for (const ValueId value : needed) {
    rest.inputs.push_back({value, InputKind::Outside, "put off"});
    const auto input = std::ranges::find(graph.inputs, value, &GraphInput::value);
    if (written.contains(value)) {
      sources.push_back({false, static_cast<size_t>(input - graph.inputs.begin())});
      continue;
    }
    first.outputs.push_back({value, OutputKind::Result, kNoValue});
    sources.push_back({true, carried++});
  }
  return parts;
}

/// What is carried and lies in the memory of an input is copied: a tensor with gaps would not lie
/// as it did, and what is on its way is waited for where it lies.
bool SplitProgram::can_be_kept(const Graph& graph, const Parts& parts) {
  const MemoryAnalysis memory(graph);
  for (size_t i = 0; i < parts.sources.size(); ++i) {
    const ValueId value = parts.rest.inputs[i].value;
    if (!parts.sources[i].is_carried || memory.inputs(value).empty()) continue;
    const int made_at = memory.uses().definition(value);
    const bool is_sent =
        made_at != Uses::kInput && is_launch(graph.nodes[static_cast<size_t>(made_at)]);
    if (is_sent || !is_dense(graph.type(value))) return false;
  }
  return true;
}

SplitProgram::SplitProgram(Parts parts, std::vector<Launch> first, std::vector<Launch> rest)
    : is_late_(std::move(parts.is_late)),
      sources_(std::move(parts.sources)),
      first_(parts.first, std::move(first)),
      rest_(parts.rest, std::move(rest)) {}

std::unique_ptr<SplitProgram> SplitProgram::make(const Graph& graph,
                                                 const std::vector<Launch>& kernels) {
  const auto mark = std::ranges::find(graph.nodes, std::string(kNextIteration), &Node::op);
  if (mark == graph.nodes.end()) return nullptr;
  const auto made_late = defined_by({mark, graph.nodes.end()});
  // A pass of the user's may have put something there that is returned.
  for (const GraphOutput& output : graph.outputs) {
    if (output.kind == OutputKind::Result && made_late.contains(output.value)) return nullptr;
  }
  const auto at = static_cast<size_t>(mark - graph.nodes.begin());
  auto parts = split(graph, at);
  if (!can_be_kept(graph, parts)) return nullptr;
  std::vector<Launch> first, rest;
  if (!kernels.empty()) {
    first.assign(kernels.begin(), kernels.begin() + static_cast<long>(at));
    rest.assign(kernels.begin() + static_cast<long>(at) + 1, kernels.end());
  }
  return std::unique_ptr<SplitProgram>(
      new SplitProgram(std::move(parts), std::move(first), std::move(rest)));
}

std::vector<at::Tensor> SplitProgram::begin(const std::vector<at::Tensor>& inputs) {
  auto made = first_.run(inputs);
  const auto early = static_cast<size_t>(std::ranges::count(is_late_, false));
  carried_.assign(made.begin() + static_cast<long>(early), made.end());
  {
    const at::NoGradGuard no_grad;
    const RunScope below_autograd;
    // A learning rate may be another one by then, an argument overwritten.
    for (auto& value : carried_) {
      const auto shares = [&](const at::Tensor& input) {
        return input.defined() && value.is_alias_of(input);
      };
      if (std::ranges::any_of(inputs, shares)) value = value.clone();
    }
  }
  live_.assign(inputs.size(), at::Tensor());
  for (const auto& [is_carried, place] : sources_) {
    if (!is_carried) live_[place] = inputs[place];
  }
  std::vector<at::Tensor> outputs;
  size_t next = 0;
  for (const bool is_late : is_late_) outputs.push_back(is_late ? at::Tensor() : made[next++]);
  return outputs;
}

std::vector<at::Tensor> SplitProgram::finish() {
  const auto live = std::exchange(live_, {});
  const auto carried = std::exchange(carried_, {});
  std::vector<at::Tensor> inputs;
  for (const auto& [is_carried, place] : sources_)
    inputs.push_back(is_carried ? carried[place] : live[place]);
  const auto made = rest_.run(inputs);
  std::vector<at::Tensor> outputs;
  size_t next = 0;
  for (const bool is_late : is_late_) outputs.push_back(is_late ? made[next++] : at::Tensor());
  return outputs;
}

}  // namespace tessera::compiler
