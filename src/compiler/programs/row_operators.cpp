// Kernels over rows for operators that modules call eagerly.
#include "compiler/ir/operators.h"
#include "compiler/passes/fuse.h"
#include "compiler/passes/passes.h"
#include "compiler/runtime/program.h"
#include "nn/row_kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace tessera::compiler {
namespace {

using nn::detail::RowOperator;

/// A graph of one node.
Graph graph_of(const RowOperator& op) {
  Graph graph;
  Node node{.op = op.name, .arguments = {}, .results = {}};
  std::optional<c10::Device> device;
  for (const auto& argument : op.arguments) {
    if (!argument.isTensor()) {
      node.arguments.push_back(Argument::of(argument));
      continue;
    }
    const auto& tensor = argument.toTensor();
    device = tensor.device();
    const auto value = graph.add_value(
        {tensor.scalar_type(), *device, tensor.sizes().vec(), tensor.strides().vec()});
    graph.inputs.push_back({value, InputKind::Argument, c10::str("argument ", value)});
    node.arguments.push_back(Argument::of(value));
  }
  for (const auto& result : op.results) {
    std::vector<int64_t> strides(result.sizes.size(), 1);
    for (size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * result.sizes[i];
    const auto value = graph.add_value({result.dtype, *device, result.sizes, strides});
    node.results.push_back(Argument::of(value));
    graph.outputs.push_back({value});
  }
  graph.nodes.push_back(std::move(node));
  return graph;
}

/// Null if it has no kernels of ours.
std::unique_ptr<Program> make_program(const RowOperator& op) {
  auto graph = graph_of(op);
  decompose(graph);
  fuse(graph);
  // Rows that can't be added up in parts would need more operators, and memory, than ATen's.
  const bool are_kernels = std::ranges::all_of(
      graph.nodes, [](const Node& node) { return node.op == kFused || is_view(node); });
  if (!are_kernels) return nullptr;
  std::string why_not;
  auto kernels = load_kernels(write_kernels(graph), &why_not);
  if (!kernels) {
    TORCH_WARN_ONCE(op.name, ": kernels of ATen are taken on this GPU: ", why_not);
    return nullptr;
  }
  return std::make_unique<Program>(graph, std::move(*kernels));
}

/// What a program is made for.
using Key = std::pair<std::string, std::vector<int64_t>>;

Key key_of(const RowOperator& op) {
  std::vector<int64_t> numbers;
  for (const auto& argument : op.arguments) {
    if (argument.isDouble()) {
      int64_t bits = 0;
      const double number = argument.toDouble();
      std::memcpy(&bits, &number, sizeof(bits));
      numbers.push_back(bits);
    }
    if (argument.isInt()) numbers.push_back(argument.toInt());
    if (!argument.isTensor()) continue;
    const auto& tensor = argument.toTensor();
    numbers.push_back(static_cast<int64_t>(tensor.scalar_type()));
    numbers.push_back(tensor.get_device());
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
  }
  return {op.name, std::move(numbers)};
}

/// Of an operator: sizes that change from call to call would be compiled for ever.
constexpr std::ptrdiff_t kMostPrograms = 32;

std::optional<std::vector<at::Tensor>> run_row_operator(const RowOperator& op) {
  static std::mutex mutex;  // a program runs once at a time
  static auto& programs = *new std::map<Key, std::unique_ptr<Program>>;  // GPUs go before statics
  std::vector<at::Tensor> inputs;
  for (const auto& argument : op.arguments) {
    if (argument.isTensor()) inputs.push_back(argument.toTensor());
  }
  const c10::DeviceGuard guard(inputs.front().device());  // also for what is loaded
  const std::lock_guard lock(mutex);
  auto key = key_of(op);
  auto found = programs.find(key);
  if (found == programs.end()) {
    const auto made = std::ranges::count_if(
        programs, [&](const auto& each) { return each.first.first == key.first; });
    if (made >= kMostPrograms) {
      TORCH_WARN_ONCE(op.name, ": has kernels of its own for ", kMostPrograms,
                      " sizes; for further ones those of ATen are taken");
      return std::nullopt;
    }
    found = programs.emplace(std::move(key), make_program(op)).first;
  }
  if (!found->second) return std::nullopt;
  return found->second->run(inputs);
}

[[maybe_unused]] const bool is_set = [] {
  nn::detail::set_row_kernels(run_row_operator);
  return true;
}();

}  // namespace
}  // namespace tessera::compiler
