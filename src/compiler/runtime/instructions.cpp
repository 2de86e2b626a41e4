// Instructions that are more, or other, than a call of an ATen operator: updates by rows (see Note
// [update early]), kernels and where their outputs lie, windows of memory and marks.
#include <tessera/comm.h>

#include "base/dispatcher.h"
#include "base/memory.h"
#include "compiler/ir/gradient_path.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/thin_products.h"
#include "compiler/runtime/program.h"

#include <ATen/Parallel.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>

#include <algorithm>

namespace tessera::compiler {

namespace {

constexpr int64_t kBlock = 512 << 10;  // bytes of a gradient: a cache holds them, with the weight's

/// For the caller, who reads it later if at all.
void keep(const at::Tensor& gradient, const at::Tensor& block) {
  const auto bytes = static_cast<int64_t>(block.nbytes());
  auto* to = static_cast<uint8_t*>(gradient.mutable_data_ptr());
  const auto* from = static_cast<const uint8_t*>(block.const_data_ptr());
  at::parallel_for(0, bytes, kBlock / 4, [&](int64_t begin, int64_t end) {
    copy_past_cache(to + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

bool are_consecutive(const GradientPath& path, int update) {
  int next = path.product;
  for (const int index : path.further) {
    if (index != ++next) return false;
  }
  return update == next + 1;
}

}  // namespace

std::map<size_t, RowUpdate> Program::find_row_updates(const Graph& graph) {
  std::map<size_t, RowUpdate> found;
  std::optional<MemoryAnalysis> memory;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& update = graph.nodes[i];
    if (!is_fused_update(update) || update.arguments.at(1).values.size() != 1) continue;
    if (!memory) memory.emplace(graph);
    const auto path = find_gradient_path(graph, memory->uses(), static_cast<int>(i), 0);
    if (!path || !are_consecutive(*path, static_cast<int>(i)) ||
        !goes_by_rows(graph, *memory, *path, update))
      continue;
    // Later rows are made of what the product reads.
    if (memory->overwrites(update, graph.nodes[static_cast<size_t>(path->product)].used()))
      continue;
    RowUpdate rows{.update = i, .gradient = update.arguments[1].values[0]};
    rows.is_kept =
        std::ranges::find(graph.outputs, rows.gradient, &GraphOutput::value) != graph.outputs.end();
    if (path->launch >= 0) {
      const Node& launch = graph.nodes[static_cast<size_t>(path->launch)];
      rows.group = group_of(launch);
      rows.reduction = launch.arguments.at(1).constant;
      rows.parts = parts_of_reduction(launch);
      rows.scatters = is_reduce_scatter(launch);
    }
    found.emplace(static_cast<size_t>(path->product), std::move(rows));
  }
  return found;
}

/// This rank's rows of what all ranks have made, combined.
at::Tensor Program::reduce(const RowUpdate& rows, const at::Tensor& made) {
  static const auto all_reduce = *find_operator("_c10d_functional::all_reduce_");
  static const auto reduce_scatter = *find_operator("_c10d_functional::reduce_scatter_tensor");
  static const auto wait = *find_operator("_c10d_functional::wait_tensor");
  if (rows.scatters)
    stack_ = {made, rows.reduction, rows.parts, rows.group};
  else
    stack_ = {made, rows.reduction, rows.group};
  call_boxed(rows.scatters ? reduce_scatter : all_reduce, stack_);
  call_boxed(wait, stack_);
  return std::move(stack_.back()).toTensor();
}

/// Blocks of these are used while a cache holds them; where they are sent, ranks have equal ones.
int64_t Program::rows_of_block(const RowUpdate& rows, int64_t row_bytes) {
  const int64_t bytes = rows.group.empty() ? kBlock * at::get_num_threads() : kBlock / rows.parts;
  return std::max<int64_t>(bytes / row_bytes, 1);
}

void Program::execute_by_rows(const Call& product, const RowUpdate& rows) {
  const Call& update = *instructions_[rows.update].call;
  note_writes(update);
  const auto& left = at(product.arguments[0].values[0]);
  const auto& right = at(product.arguments[1].values[0]);
  const auto& type = types_[static_cast<size_t>(rows.gradient)];
  std::unordered_map<ValueId, at::Tensor> tensors;
  for (const auto& argument : update.arguments) {
    for (const ValueId value : argument.values) {
      if (value != kNoValue && value != rows.gradient &&
          types_[static_cast<size_t>(value)].sizes == type.sizes)
        tensors[value] = at(value);
    }
  }
  const int64_t count = type.sizes[0], columns = type.sizes[1];
  const int64_t most = std::min(
      count, rows_of_block(rows, columns * static_cast<int64_t>(c10::elementSize(type.dtype))));
  const auto memory = memory_for_block(rows, most * rows.parts, type);
  const auto gradient = rows.is_kept ? make_value(rows.gradient) : at::Tensor();
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t length = std::min(most, count - begin);
    for (const auto& [value, tensor] : tensors) at(value) = tensor.narrow(0, begin, length);
    auto made = memory.narrow(0, 0, length * rows.parts);
    for (int64_t part = 0; part < rows.parts; ++part) {
      auto block = made.narrow(0, part * length, length);
      const auto factors = left.narrow(0, part * count + begin, length);
      if (!multiply_thin(block, factors, right)) at::mm_out(block, factors, right);
    }
    if (!rows.group.empty()) made = reduce(rows, made);
    at(rows.gradient) = made;
    has_updated_ = true;
    call(update);
    if (rows.is_kept) keep(gradient.narrow(0, begin, length), made);
  }
  at(rows.gradient) = gradient;
  for (const auto& [value, tensor] : tensors) at(value) = tensor;
  for (size_t i = 0; i < update.written.size(); ++i) {
    const auto& from = update.arguments[update.written[i]].values;
    for (size_t k = 0; k < from.size(); ++k) {
      if (update.results[i][k] != kNoValue) at(update.results[i][k]) = at(from[k]);
    }
  }
  check_results(update);
}

// How a program runs kernels: where their outputs lie.

namespace {

/// Whether nobody else has the tensor, or a view of it, and it is all of its memory.
bool is_sole(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().nbytes() == tensor.nbytes();
}

}  // namespace

Program::KernelCall Program::make_kernel_call(const Node& node, Launch launch,
                                              const std::vector<ValueId>& in_place,
                                              const std::vector<ValueId>& over) {
  KernelCall call{.launch = std::move(launch), .outputs = node.defined()};
  const auto used = node.used();
  for (const size_t input : kernel_inputs(*node.body)) call.inputs.push_back(used.at(input));
  for (const auto value : call.outputs) {
    call.in_place.push_back(in_place[static_cast<size_t>(value)]);
    call.over.push_back(over[static_cast<size_t>(value)]);
  }
  return call;
}

void Program::execute(const KernelCall& call) {
  std::vector<void*> tensors;
  tensors.reserve(call.inputs.size() + call.outputs.size());
  for (const auto value : call.inputs)
    tensors.push_back(const_cast<void*>(at(value).unsafeGetTensorImpl()->data()));
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    auto& output = at(call.outputs[i]);
    if (const auto input = call.in_place[i]; input != kNoValue) {
      shared_.before_write(input);
      output = at(input);
    } else if (const auto over = call.over[i]; over != kNoValue && is_sole(at(over))) {
      output = std::move(at(over));
    } else {
      output = make_value(call.outputs[i]);
    }
    tensors.push_back(output.unsafeGetTensorImpl()->mutable_data());
  }
  call.launch(tensors.data());
}

// Parts of memory as operators: a tensor seen with other sizes and strides, from `offset` elements
// after its first one. Unlike as_strided, whose offset counts from the start of the storage, they
// mean the same for a tensor that lies elsewhere. And marks: where a step has a parameter's
// gradient, and where it may end for this time.

namespace {

at::Tensor window(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                  int64_t offset) {
  return self.as_strided(sizes, strides, self.storage_offset() + offset);
}

at::Tensor window_scatter(const at::Tensor& self, const at::Tensor& source, at::IntArrayRef sizes,
                          at::IntArrayRef strides, int64_t offset) {
  auto result = at::empty_strided(self.sizes(), self.strides(), self.options());
  result.copy_(self);
  result.as_strided(sizes, strides, offset).copy_(source);
  return result;
}

at::Tensor gradient(const at::Tensor& self, const at::Tensor& /*parameter*/) {
  return self.clone();
}

void next_iteration() {}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("window(Tensor(a) self, int[] size, int[] stride, int offset) -> Tensor(a)");
  library.def(
      "window_scatter(Tensor self, Tensor source, int[] size, int[] stride, int offset) -> Tensor");
  library.def("gradient(Tensor self, Tensor parameter) -> Tensor");
  library.def("next_iteration() -> ()");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, library) {
  library.impl("window", &window);
  library.impl("window_scatter", &window_scatter);
  library.impl("gradient", &gradient);
  library.impl("next_iteration", &next_iteration);
}

}  // namespace tessera::compiler
