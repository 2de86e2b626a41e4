#include "compiler/agreement.h"

#include <tessera/comm.h>

#include "base/capture.h"
#include "compiler/ir/operators.h"
#include "compiler/trace/key.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <functional>
#include <map>

namespace tessera::compiler {
namespace {

/// A tensor that the group's backends can send.
at::Tensor sendable(at::ArrayRef<int64_t> numbers, const Group& group) {
  const auto devices = group->getDeviceTypes();
  const auto tensor = at::tensor(numbers, at::kLong);
  const bool on_cpu =
      devices.empty() || std::any_of(devices.begin(), devices.end(),
                                     [](const c10::Device& device) { return device.is_cpu(); });
  return on_cpu ? tensor : tensor.to(devices.front());
}

/// The range of those of the group's ranks. Nobody has written this collective, so that its errors
/// say who calls it.
Agreement::Range exchange_in(const Group& group, const Agreement::Range& mine) {
  try {
    const auto least =
        all_reduce(sendable({mine.least, -mine.most}, group), ReduceOp::MIN, group).to(at::kCPU);
    return {least[0].item<int64_t>(), -least[1].item<int64_t>()};
  } catch (c10::Error& error) {
    error.add_context(
        "compile: by this all_reduce of 2 int64 ranks agree before each call of a compiled step, "
        "and in each compiled forward or backward, that communicates; every rank of the group "
        "has to make the same compiled calls in the same order");
    throw;
  }
}

}  // namespace

void Agreement::meet(const std::vector<std::string>& groups) {
  for (const auto& name : groups) {
    if (std::find(groups_.begin(), groups_.end(), name) == groups_.end()) groups_.push_back(name);
  }
}

Agreement::Range Agreement::exchange(int64_t mine) const {
  Range range{mine, mine};
  const RunScope run;
  const capture::ObserverScope unseen(nullptr);
  const at::NoGradGuard no_grad;
  // One group after the other: what came through the first goes on through the second, so that a
  // whole mesh knows.
  for (const auto& name : groups_) {
    const auto group = c10d::resolve_process_group(name);
    if (group->getSize() > 1) range = exchange_in(group, range);
  }
  return range;
}

int64_t signature_of(const Graph& graph) {
  std::string messages;
  std::map<std::string, size_t> groups;  // a rank's groups have other names than its peer's
  for (const auto& node : graph.nodes) {
    if (!is_launch(node)) continue;
    messages +=
        c10::str(node.op, " ", groups.try_emplace(group_of(node), groups.size()).first->second);
    for (const auto value : node.used()) {
      messages += c10::str(" ", graph.type(value).dtype);
      if (!sends_unevenly(node)) messages += c10::str(graph.type(value).sizes);
    }
    // Tensors of one size are not to meet others' of that size.
    for (const auto number : node.messages) messages += c10::str(" #", number);
    messages += "\n";
  }
  return static_cast<int64_t>(std::hash<std::string>()(messages) >> 2) + 1;
}

std::vector<std::string> groups_of(const Graph& graph) {
  std::vector<std::string> groups;
  for (const auto& node : graph.nodes) {
    if (is_launch(node)) groups.push_back(group_of(node));
  }
  return groups;
}

}  // namespace tessera::compiler
