#include "compiler/programs/agreement.h"

#include <tessera/comm.h>

#include "base/capture.h"
#include "base/devices.h"
#include "comm/backends.h"
#include "compiler/ir/operators.h"
#include "compiler/record/dispatch_key.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

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
        "compile: by this all_reduce of 2 int64 ranks agree when a program is made of a compiled "
        "step, forward or backward that communicates; every rank of the group has to make the "
        "same compiled calls in the same order");
    throw;
  }
}

}  // namespace

void Agreement::meet(const std::vector<std::string>& groups) {
  for (const auto& name : groups) {
    if (std::find(groups_.begin(), groups_.end(), name) != groups_.end()) continue;
    groups_.push_back(name);
    const auto group = c10d::resolve_process_group(name);
    const auto device = comm::unchecked_device(*group);
    if (group->getSize() > 1 && device) checks_.emplace_back(name, *device);
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

void ProgramCheck::check(const Comparison& comparison) const {
  const int64_t least = comparison.told.const_data_ptr<int64_t>()[0];
  const int64_t most = -comparison.told.const_data_ptr<int64_t>()[1];
  TORCH_CHECK_VALUE(
      least == most, "compile: expected all ranks of the group '", group_,
      "' to run the same program, or none, but this rank ",
      comparison.mine == 0 ? "ran eagerly and some rank ran a program"
      : least == 0         ? "ran a program and some rank ran eagerly"
                           : "ran one program and some rank another one, or its CUDA graph was "
                             "captured again on some ranks alone (parameters were moved there, or "
                             "memory ended)",
      "; make compiled calls of one kind on all ranks at the same time, e.g. with batches of one "
      "size (DataParallelSemantics::OneDevice takes others with uneven_batches = true)");
}

void ProgramCheck::read(bool all) {
  while (!pending_.empty()) {
    auto& next = pending_.front();
    if (next.copied && all) next.copied->synchronize();
    if (next.copied && !next.copied->query()) return;
    const auto comparison = std::move(next);
    pending_.pop_front();
    check(comparison);
  }
}

void ProgramCheck::compare(int64_t mine, bool now) {
  read(/*all=*/false);
  const auto group = c10d::resolve_process_group(group_);
  // Filled there: a copy from the host would make it wait.
  const auto numbers = at::empty({2}, at::TensorOptions(at::kLong).device(device_));
  numbers.select(0, 0).fill_(mine);
  numbers.select(0, 1).fill_(-mine);
  const auto told = all_reduce(numbers, ReduceOp::MIN, group);
  Comparison comparison{mine, told};
  if (!told.is_cpu()) {
    comparison.told = at::empty(told.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
    comparison.told.copy_(told, /*non_blocking=*/true);
    comparison.copied.emplace(told.device().type());
    comparison.copied->record(current_stream(told.device()));
  }
  pending_.push_back(std::move(comparison));
  if (now || told.is_cpu()) read(/*all=*/true);
}

void Agreement::announce(int64_t program, bool now) {
  const RunScope run;
  const capture::ObserverScope unseen(nullptr);
  const at::NoGradGuard no_grad;
  for (auto& check : checks_) check.compare(program, now || program == 0);
}

namespace {

int64_t signature(const Graph& graph, bool has_sizes) {
  std::string messages;
  std::map<std::string, size_t> groups;  // a rank's groups have other names than its peer's
  for (const auto& node : graph.nodes) {
    if (!is_launch(node)) continue;
    messages +=
        c10::str(node.op, " ", groups.try_emplace(group_of(node), groups.size()).first->second);
    for (const auto value : node.used()) {
      messages += c10::str(" ", graph.type(value).dtype);
      if (has_sizes && !sends_unevenly(node)) messages += c10::str(graph.type(value).sizes);
    }
    // Tensors of one size are not to meet others' of that size.
    for (const auto number : node.messages) messages += c10::str(" #", number);
    messages += "\n";
  }
  return static_cast<int64_t>(std::hash<std::string>()(messages) >> 2) + 1;
}

}  // namespace

int64_t signature_of(const Graph& graph) { return signature(graph, /*has_sizes=*/true); }
int64_t signature_without_sizes(const Graph& graph) {
  return signature(graph, /*has_sizes=*/false);
}

std::vector<std::string> groups_of(const Graph& graph) {
  std::vector<std::string> groups;
  for (const auto& node : graph.nodes) {
    if (is_launch(node)) groups.push_back(group_of(node));
  }
  return groups;
}

}  // namespace tessera::compiler
