#include "compiler/runtime/program.h"

#include <tessera/comm.h>

#include "base/dispatcher.h"
#include "base/memory.h"
#include "comm/backends.h"
#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/buffers.h"
#include "compiler/kernels/thin_products.h"
#include "compiler/programs/agreement.h"
#include "compiler/record/dispatch_key.h"
#include "compiler/record/memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>

namespace tessera::compiler {
namespace {

bool is_optional_list(const c10::Argument& declared) {
  const auto& type = declared.type();
  return type->kind() == c10::TypeKind::ListType &&
         type->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::OptionalType;
}

bool shares_memory(const std::string& group) {
  try {
    return comm::shares_memory(*c10d::resolve_process_group(group), c10::kCPU);
  } catch (const c10::Error&) {
    return false;  // a graph that was read from a file
  }
}

/// In memory that other ranks of the group read. A rank that has no more of that takes its own:
/// what it sends is copied then.
at::Tensor bytes_for(const std::string& group, int64_t bytes) {
  const at::TensorOptions options(at::kByte);
  try {
    return empty_shared({bytes}, options, c10d::resolve_process_group(group));
  } catch (const c10::OutOfMemoryError&) {
    return at::empty({bytes}, options);
  }
}

/// Dimensions of one element may have any stride.
bool same_strides(const at::Tensor& tensor, const ValueType& type) {
  if (tensor.numel() == 0) return true;
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.sizes[i] > 1 && tensor.strides()[i] != type.strides[i]) return false;
  }
  return true;
}

}  // namespace

Program::Program(const Graph& graph, std::vector<Launch> kernels)
    : outputs_(graph.outputs), shared_(graph) {
  for (size_t i = 0; i < graph.value_count(); ++i)
    types_.push_back(graph.type(static_cast<ValueId>(i)));
  for (const auto& input : graph.inputs) inputs_.push_back(input.value);
  for (const auto& output : outputs_) {
    const auto target = std::find(inputs_.begin(), inputs_.end(), output.target);
    written_.push_back(output.kind == OutputKind::Write ? static_cast<int>(target - inputs_.begin())
                                                        : -1);
  }
  auto freed = last_uses(graph);
  // What a run frees is there for the next one.
  if (std::ranges::any_of(types_, [](const ValueType& type) { return type.device.is_cpu(); }))
    keep_memory_warm();
  row_updates_ = find_row_updates(graph);
  for (const auto& [product, rows] : row_updates_) {
    for (size_t i = product; i < rows.update; ++i)
      std::ranges::move(std::exchange(freed[i], {}), std::back_inserter(freed[rows.update]));
  }
  const auto in_place = in_place_targets(graph);
  const auto over = overwritable_inputs(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const auto& node = graph.nodes[i];
    Instruction instruction{.freed = freed[i], .op = node.op, .module = node.module};
    if (node.op == kFused) {
      TORCH_INTERNAL_ASSERT(i < kernels.size() && kernels[i], "compile: a kernel is missing");
      instruction.kernel = make_kernel_call(node, std::move(kernels[i]), in_place, over);
    } else {
      instruction.call = make_call(node);
    }
    instructions_.push_back(std::move(instruction));
  }
  values_.resize(types_.size());
  groups_ = groups_of(graph);
  find_sent(graph);
}

void Program::enable_replay(const Graph& graph) {
  const bool is_for_gpu =
      std::ranges::any_of(types_, [](const ValueType& type) { return type.device.is_cuda(); });
  if (is_for_gpu)
    replay_.emplace(graph, [this](const auto& inputs) { return run_instructions(inputs); });
}

/// What a kernel or a product of matrices makes for others lies where they can read it.
void Program::find_sent(const Graph& graph) {
  std::unordered_map<ValueId, ValueId> made;  // by value: itself, or what it is a view of
  for (const auto& node : graph.nodes) {
    if (node.op == kFused || is_matrix_product(node)) {
      for (const ValueId value : node.defined()) made[value] = value;
    } else if (views_from_start(node) && node.arguments[0].kind == Argument::Kind::Value) {
      const auto from = made.find(node.arguments[0].values.at(0));
      if (from != made.end()) made[node.results[0].values.at(0)] = from->second;
    }
    if (!is_all_reduce(node) && !is_reduce_scatter(node)) continue;
    if (!reads_until_waited(node) || !shares_memory(group_of(node))) continue;
    for (const ValueId value : node.arguments[0].values) {
      const auto found = made.find(value);
      if (found == made.end() || !graph.type(value).is_contiguous()) continue;
      const ValueType& type = graph.type(found->second);
      if (!type.device.is_cpu() || !type.is_contiguous() || sent_.contains(found->second)) continue;
      const auto pool = std::ranges::find_if(pools_, [&](const SharedPool& each) {
        return each.group == group_of(node) && each.bytes == type.bytes();
      });
      sent_[found->second] = static_cast<size_t>(pool - pools_.begin());
      if (pool == pools_.end()) pools_.push_back({group_of(node), type.bytes()});
      ++pools_[sent_[found->second]].values;
    }
  }
}

at::Tensor Program::memory_for_block(const RowUpdate& rows, int64_t count, const ValueType& like) {
  const int64_t columns = like.sizes[1];
  const auto bytes = count * columns * static_cast<int64_t>(c10::elementSize(like.dtype));
  auto& memory = blocks_[rows.group];
  if (!memory.defined() || memory.numel() < bytes)
    memory = rows.group.empty() ? at::empty({bytes}, at::TensorOptions(at::kByte))
                                : bytes_for(rows.group, bytes);
  return memory.narrow(0, 0, bytes).view(like.dtype).view({count, columns});
}

at::Tensor Program::memory_for(SharedPool& pool, const ValueType& type) {
  const auto free = std::ranges::find_if(
      pool.kept, [](const at::Tensor& tensor) { return tensor.storage().use_count() == 1; });
  const auto as_value = [&](const at::Tensor& bytes) {
    return bytes.view(type.dtype).view(type.sizes);
  };
  if (free != pool.kept.end()) {
    // Another thread may have read it last, for a message.
    std::atomic_thread_fence(std::memory_order_acquire);
    return as_value(*free);
  }
  pool.kept.push_back(bytes_for(pool.group, pool.bytes));
  // Gradients of one step may be held while the next one makes its own; older ones are their
  // holders' alone.
  if (pool.kept.size() > 2 * pool.values) pool.kept.erase(pool.kept.begin());
  return as_value(pool.kept.back());
}

Program::Call Program::make_call(const Node& node) {
  const auto op = find_operator(node.op);
  TORCH_INTERNAL_ASSERT(op, "compile: no operator ", node.op);
  Call call{.op = *op,
            .own = own_returns(op->schema()),
            .is_gather = is_gather(node),
            .asks_grad_mode = asks_grad_mode(node),
            .factors = factors_of(node)};
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    call.arguments.push_back(make_slot(node.arguments[i], op->schema().arguments()[i]));
    if (writes(node, i)) call.written.push_back(i);
  }
  for (const auto& result : node.results) call.results.push_back(result.values);
  TORCH_INTERNAL_ASSERT(call.results.size() == call.written.size() + call.own.size(),
                        "compile: results of ", node.op);
  return call;
}

Program::Slot Program::make_slot(const Argument& argument, const c10::Argument& declared) {
  Slot slot{argument.kind, argument.constant, argument.values, is_optional_list(declared)};
  if (slot.kind == Argument::Kind::Constant)
    slot.constant = constant_as_declared(slot.constant, declared);
  return slot;
}

const std::string& Program::why_not_replayed() const {
  static const auto& kNone = *new std::string();
  return replay_ ? replay_->why_not() : kNone;
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  const RunScope below_autograd;
  return replay_ ? replay_->run(inputs) : run_instructions(inputs);
}

std::vector<at::Tensor> Program::run_instructions(const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs_.size(); ++i) at(inputs_[i]) = inputs[i];
  shared_.begin();
  // All ranks alike: they run the same program.
  if (!is_checked_)
    in_foreground_ = std::any_of(groups_.begin(), groups_.end(), [](const std::string& name) {
      return !comm::has_cores_to_spare(c10d::resolve_process_group(name));
    });
  has_updated_ = false;
  std::optional<comm::ForegroundScope> in_turn;
  if (in_foreground_) in_turn.emplace();
  try {
    execute();
  } catch (c10::Error& error) {
    std::fill(values_.begin(), values_.end(), at::Tensor());
    error.add_context(where());
    if (has_updated_)
      error.add_context(
          "compile: some weights have been updated by this step and others have not; load a "
          "checkpoint before training goes on");
    throw;
  } catch (...) {
    std::fill(values_.begin(), values_.end(), at::Tensor());
    throw;
  }
  running_ = nullptr;
  shared_.end();
  std::vector<at::Tensor> outputs;
  for (const auto& output : outputs_)
    outputs.push_back(output.value == kNoValue ? at::Tensor() : at(output.value));
  for (const auto& output : outputs_) {
    if (output.value != kNoValue) at(output.value).reset();
  }
  for (const auto value : inputs_) at(value).reset();
  write_inputs(outputs, inputs);
  is_checked_ = true;
  return outputs;
}

void Program::execute() {
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const auto& instruction = instructions_[i];
    running_ = &instruction;
    if (!shared_.is_empty()) shared_.reach(i);
    if (const auto found = row_updates_.find(i); found != row_updates_.end()) {
      execute_by_rows(*instruction.call, found->second);
      i = found->second.update;
    } else {
      instruction.call ? execute(*instruction.call, i) : execute(*instruction.kernel);
    }
    for (const auto value : instructions_[i].freed) at(value).reset();
  }
}

/// Inputs are written when nothing reads them any more. What lies in their memory and leaves the
/// program is copied before: which outputs do is the same at every run.
void Program::write_inputs(std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) {
  const auto target_of = [&](size_t output) -> const at::Tensor& {
    return inputs[static_cast<size_t>(written_[output])];
  };
  const auto is_elsewhere = [&](size_t output) {
    return written_[output] >= 0 && !shows_same_memory(outputs[output], target_of(output));
  };
  if (!is_checked_) {
    is_overwritten_.assign(outputs.size(), false);
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (size_t other = 0; outputs[i].defined() && other < outputs.size(); ++other)
        is_overwritten_[i] = is_overwritten_[i] || (other != i && is_elsewhere(other) &&
                                                    outputs[i].is_alias_of(target_of(other)));
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (is_overwritten_[i]) outputs[i] = outputs[i].clone();
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (is_elsewhere(i)) target_of(i).copy_(outputs[i]);
  }
}

void Program::push(const Slot& slot) {
  switch (slot.kind) {
    case Argument::Kind::Constant:
      stack_.push_back(slot.constant);
      return;
    case Argument::Kind::Value:
      if (slot.values[0] == kNoValue)
        stack_.emplace_back();
      else
        stack_.emplace_back(values_[static_cast<size_t>(slot.values[0])]);
      return;
    case Argument::Kind::List:
      if (slot.is_optional_list) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto value : slot.values)
          list.push_back(value == kNoValue ? std::nullopt
                                           : std::optional(values_[static_cast<size_t>(value)]));
        stack_.emplace_back(std::move(list));
      } else {
        std::vector<at::Tensor> list;
        for (const auto value : slot.values)
          list.push_back(value == kNoValue ? at::Tensor() : values_[static_cast<size_t>(value)]);
        stack_.emplace_back(std::move(list));
      }
  }
}

std::string Program::where() const {
  if (running_ == nullptr) return "compile: in a compiled program";
  const auto& module = running_->module;
  return "compile: in " + running_->op + (module.empty() ? "" : ", called by " + module) +
         ", in a compiled program";
}

void Program::note_writes(const Call& call) {
  if (shared_.is_empty()) return;
  for (const size_t index : call.written) {
    for (const auto value : call.arguments[index].values) shared_.before_write(value);
  }
}

void Program::execute(const Call& call, size_t node) {
  note_writes(call);
  if (call.factors && multiply(call)) {
    // Done.
  } else if (!call.is_gather || !see_in_place(call, node)) {
    this->call(call);
  }
  check_results(call);
}

/// False: the operator is to do it, and allocate its result.
bool Program::multiply(const Call& call) {
  const ValueId made = call.results[0][0];
  const auto value = [&](size_t argument) -> const at::Tensor& {
    return at(call.arguments[argument].values[0]);
  };
  const size_t left = *call.factors;
  const bool is_sent = sent_.contains(made);
  // Smaller ones stay in a cache, and keep eager's bits.
  constexpr int64_t kLeast = int64_t{1} << 16;
  const auto& type = types_[static_cast<size_t>(made)];
  const auto largest = std::max({type.numel(), value(left).numel(), value(left + 1).numel()});
  if (!is_sent && (largest < kLeast || !type.is_contiguous())) return false;
  auto result = make_value(made);
  if (largest < kLeast ||
      !multiply_thin(result, value(left), value(left + 1), left == 0 ? at::Tensor() : value(0))) {
    if (!is_sent || left > 0) return false;
    at::mm_out(result, value(left), value(left + 1));
  }
  at(made) = std::move(result);
  return true;
}

void Program::check_results(const Call& call) const {
  if (is_checked_) return;
  for (const auto& values : call.results) {
    for (const auto value : values) check_result(call, value);
  }
}

/// Whether a gather moves nothing, see Note [seen in place]; what must travel has done so, too.
bool Program::see_in_place(const Call& call, size_t node) {
  const auto& from = call.arguments[0].values;
  const auto& to = call.results[0];
  std::vector<at::Tensor> parts;
  for (const auto value : from) parts.push_back(at(value));
  auto unsharded = shared_.open(node, parts);
  if (unsharded.empty()) return false;
  std::vector<at::Tensor> travelling;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!unsharded[i].defined()) travelling.push_back(parts[i]);
  }
  std::vector<at::Tensor> arrived;
  if (!travelling.empty()) {
    stack_ = {travelling, call.arguments[1].constant, call.arguments[2].constant};
    call_boxed(call.op, stack_);
    arrived = stack_.back().toTensorVector();
  }
  auto next = arrived.begin();
  for (size_t i = 0; i < to.size(); ++i)
    at(to[i]) = unsharded[i].defined() ? std::move(unsharded[i]) : std::move(*next++);
  return true;
}

void Program::call(const Call& call) {
  stack_.clear();
  for (const auto& argument : call.arguments) push(argument);
  // What consumed arguments become lies where they lay.
  size_t result = 0;
  for (const size_t index : call.written) {
    const auto& from = call.arguments[index].values;
    const auto& to = call.results[result++];
    for (size_t i = 0; i < from.size(); ++i) {
      if (to[i] != kNoValue) at(to[i]) = at(from[i]);
    }
  }
  {
    const c10::AutoGradMode grad_mode(call.asks_grad_mode || c10::GradMode::is_enabled());
    call_boxed(call.op, stack_);
  }
  for (const size_t own : call.own) {
    const auto& to = call.results[result++];
    auto& given = stack_[own];
    if (given.isTensor()) {
      if (to[0] != kNoValue) at(to[0]) = std::move(given).toTensor();
    } else {
      const auto list = given.toTensorList();
      for (size_t i = 0; i < to.size(); ++i) {
        if (to[i] != kNoValue) at(to[i]) = list.get(i);
      }
    }
  }
}

at::Tensor Program::make_value(ValueId value) {
  const auto& type = types_[static_cast<size_t>(value)];
  if (const auto sent = sent_.find(value); sent != sent_.end())
    return memory_for(pools_[sent->second], type);
  return at::empty_strided(type.sizes, type.strides,
                           at::TensorOptions(type.device).dtype(type.dtype));
}

void Program::check_result(const Call& call, ValueId value) const {
  if (value == kNoValue) return;
  const auto& tensor = values_[static_cast<size_t>(value)];
  const auto& type = types_[static_cast<size_t>(value)];
  TORCH_INTERNAL_ASSERT(tensor.defined() && tensor.sizes() == type.sizes &&
                            tensor.scalar_type() == type.dtype && same_strides(tensor, type),
                        "compile: ", call.op.schema().name(), " gave sizes ", tensor.sizes(),
                        " and strides ", tensor.strides(), " of ", tensor.scalar_type(), " where ",
                        type.sizes, ", ", type.strides, " of ", type.dtype, " were recorded");
}

}  // namespace tessera::compiler
