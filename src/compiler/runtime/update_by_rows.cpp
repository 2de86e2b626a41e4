// What a program does with a weight's gradient and update: see Note [update early].
#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/runtime/program.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace tessera::compiler {

namespace {

/// Whether a node is a product of matrices whose rows the node behind it takes one by one, to
/// update a weight.
bool is_pair(const Graph& graph, const Node& product, const Node& update) {
  if (!is_matrix_product(product) || !is_fused_update(update)) return false;
  const ValueId gradient = product.results[0].values[0];
  const auto& type = graph.type(gradient);
  if (update.arguments[1].values != std::vector<ValueId>{gradient} || !type.device.is_cpu() ||
      !type.is_contiguous() || type.numel() == 0)
    return false;
  // Parameter and state lie as the gradient does; what else it takes belongs to all rows.
  for (const ValueId value : update.used()) {
    const auto& other = graph.type(value);
    if (other.sizes == type.sizes ? !other.is_contiguous() : other.numel() != 1) return false;
  }
  return true;
}

}  // namespace

std::vector<bool> Program::updated_by_rows(const Graph& graph) {
  std::vector<bool> found(graph.nodes.size(), false);
  std::optional<MemoryAnalysis> memory;
  for (size_t i = 0; i + 1 < graph.nodes.size(); ++i) {
    const Node& product = graph.nodes[i];
    const Node& update = graph.nodes[i + 1];
    if (!is_pair(graph, product, update)) continue;
    if (!memory) memory.emplace(graph);
    // Later rows are made of what the product reads.
    found[i] = !memory->overwrites(update, product.used());
  }
  return found;
}

/// Note [update early]: a block of the gradient is used while the cache holds it.
void Program::execute_by_rows(const Call& product, const Call& update) {
  note_writes(update);
  constexpr int64_t kBlock = 512 << 10;  // bytes, per thread
  const ValueId result = product.results[0][0];
  const auto& left = at(product.arguments[0].values[0]);
  const auto& right = at(product.arguments[1].values[0]);
  std::unordered_map<ValueId, at::Tensor> tensors = {{result, make_value(result)}};
  const at::Tensor& gradient = tensors.at(result);
  for (const auto& argument : update.arguments) {
    for (const ValueId value : argument.values) {
      if (value != kNoValue && value != result &&
          types_[static_cast<size_t>(value)].sizes == gradient.sizes())
        tensors[value] = at(value);
    }
  }
  const int64_t rows = gradient.size(0);
  const auto row_bytes = static_cast<int64_t>(gradient.nbytes()) / rows;
  const int64_t most = std::max<int64_t>(kBlock * at::get_num_threads() / row_bytes, 1);
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t count = std::min(most, rows - begin);
    for (const auto& [value, tensor] : tensors) at(value) = tensor.narrow(0, begin, count);
    at::mm_out(at(result), left.narrow(0, begin, count), right);
    call(update);
  }
  for (const auto& [value, tensor] : tensors) at(value) = tensor;
  for (size_t i = 0; i < update.written.size(); ++i) {
    const auto& from = update.arguments[update.written[i]].values;
    for (size_t k = 0; k < from.size(); ++k) {
      if (update.results[i][k] != kNoValue) at(update.results[i][k]) = at(from[k]);
    }
  }
  check_results(product);
  check_results(update);
}

}  // namespace tessera::compiler
