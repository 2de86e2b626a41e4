#include "compiler/runtime/program.h"

#include <tessera/comm.h>

#include "base/call_boxed.h"
#include "comm/foreground.h"
#include "compiler/agreement.h"
#include "compiler/codegen/program_interface.h"
#include "compiler/ir/operators.h"
#include "compiler/trace/key.h"

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <ranges>
#include <unordered_set>

namespace tessera::compiler {
namespace {

/// A number where the operator wants a tensor: takes part in type promotion as a number does.
at::Tensor number_as_tensor(const at::Scalar& number) {
  auto tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

bool wants_tensor(const c10::Argument& declared) {
  const auto& type = declared.type();
  if (type->kind() == c10::TypeKind::TensorType) return true;
  return type->kind() == c10::TypeKind::OptionalType &&
         type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType;
}

bool is_optional_list(const c10::Argument& declared) {
  const auto& type = declared.type();
  return type->kind() == c10::TypeKind::ListType &&
         type->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::OptionalType;
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

/// Program, as its compiled form sees it.
struct Frame {
  static Program& of(Frame* frame) { return *reinterpret_cast<Program*>(frame); }

  static void call(Frame* frame, int node) {
    auto& program = of(frame);
    program.execute(*program.instructions_[static_cast<size_t>(node)]);
  }
  static void make(Frame* frame, int value) { of(frame).make_value(value); }
  static void make_in_place(Frame* frame, int value, int input) {
    of(frame).shared_.before_write(input);
    of(frame).at(value) = of(frame).at(input);
  }
  static void* address(Frame* frame, int value) {
    return of(frame).at(value).unsafeGetTensorImpl()->mutable_data();
  }
  static void drop(Frame* frame, int value) { of(frame).at(value).reset(); }
  static void deliver(Frame* /*frame*/, int /*output*/) {}  // run() returns all of them
  static void parallel(int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
                       const void* closure) {
    at::parallel_for(0, count, grain,
                     [&](int64_t begin, int64_t end) { part(closure, begin, end); });
  }
  static constexpr ProgramInterface kInterface = {call, make,    make_in_place, address,
                                                  drop, deliver, parallel};
};

Program::Program(const Graph& graph, std::shared_ptr<Module> compiled)
    : compiled_(std::move(compiled)), shared_(graph) {
  for (size_t i = 0; i < graph.value_count(); ++i)
    types_.push_back(graph.type(static_cast<ValueId>(i)));
  for (const auto& input : graph.inputs) inputs_.push_back(input.value);
  for (const auto& output : graph.outputs) outputs_.push_back(output.value);
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    instructions_.push_back(graph.nodes[i].op == kFused ? std::nullopt
                                                        : std::optional(make(graph.nodes[i], i)));
  values_.resize(types_.size());
  groups_ = groups_of(graph);
  if (compiled_)
    find_sent(graph);
  else
    find_last_uses();
}

/// What a kernel makes and an all-reduce takes in place lies where the other ranks can read it.
void Program::find_sent(const Graph& graph) {
  std::unordered_set<ValueId> made;
  for (const auto& node : graph.nodes) {
    if (node.op == kFused) {
      const auto results = node.defined();
      made.insert(results.begin(), results.end());
    }
    if (!is_all_reduce(node) || !consumes(node)) continue;
    for (const auto value : node.arguments[0].values) {
      if (made.contains(value) && graph.type(value).device.is_cpu() &&
          graph.type(value).is_contiguous())
        sent_[value] = {node.arguments[2].constant.toStringRef()};
    }
  }
}

at::Tensor Program::memory_for(Sent& sent, const ValueType& type) const {
  for (const auto& tensor : sent.kept) {
    if (tensor.use_count() == 1 && tensor.storage().use_count() == 1) return tensor;
  }
  const auto options = at::TensorOptions(type.device).dtype(type.dtype);
  sent.kept.push_back(empty_shared(type.sizes, options, c10d::resolve_process_group(sent.group)));
  constexpr size_t kMostKept = 2;  // gradients of one step may be held while the next one makes its
  if (sent.kept.size() > kMostKept) sent.kept.erase(sent.kept.begin());
  return sent.kept.back();
}

Program::Instruction Program::make(const Node& node, size_t index) {
  const auto op = find_operator(node.op);
  TORCH_INTERNAL_ASSERT(op, "compile: no operator ", node.op);
  Instruction instruction{
      *op, {}, {}, {}, {}, {}, index, is_gather(node), asks_grad_mode(node), node.module};
  const auto& schema = op->schema();
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    instruction.arguments.push_back(make_slot(node.arguments[i], schema.arguments()[i]));
    if (writes(node, i)) instruction.written.push_back(i);
  }
  for (const auto& result : node.results) instruction.results.push_back(result.values);
  instruction.own = own_returns(schema);
  TORCH_INTERNAL_ASSERT(
      instruction.results.size() == instruction.written.size() + instruction.own.size(),
      "compile: results of ", node.op);
  return instruction;
}

Program::Slot Program::make_slot(const Argument& argument, const c10::Argument& declared) {
  Slot slot{argument.kind, argument.constant, argument.values, is_optional_list(declared),
            wants_tensor(declared)};
  if (slot.kind == Argument::Kind::Constant && slot.wants_tensor && slot.constant.isScalar())
    slot.constant = number_as_tensor(slot.constant.toScalar());
  // Attention on a GPU is given no bias so.
  const bool is_required = declared.type()->kind() == c10::TypeKind::TensorType;
  if (slot.kind == Argument::Kind::Constant && slot.constant.isNone() && is_required)
    slot.constant = at::Tensor();
  return slot;
}

void Program::find_last_uses() {
  std::vector<bool> is_needed(types_.size(), false);
  for (const auto value : outputs_) {
    if (value != kNoValue) is_needed[static_cast<size_t>(value)] = true;
  }
  const auto note = [&](Instruction& instruction, ValueId value) {
    if (value == kNoValue || is_needed[static_cast<size_t>(value)]) return;
    is_needed[static_cast<size_t>(value)] = true;
    instruction.last_used.push_back(value);
  };
  for (auto& instruction : instructions_ | std::views::reverse) {
    TORCH_INTERNAL_ASSERT(instruction, "compile: a kernel without compiled code");
    for (const auto& result : instruction->results) {
      for (const auto value : result) note(*instruction, value);
    }
    for (const auto& argument : instruction->arguments) {
      for (const auto value : argument.values) note(*instruction, value);
    }
  }
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  const RunScope below_autograd;
  for (size_t i = 0; i < inputs_.size(); ++i) values_[static_cast<size_t>(inputs_[i])] = inputs[i];
  shared_.begin();
  // All ranks alike: they run the same program.
  if (!is_checked_)
    in_foreground_ = std::any_of(groups_.begin(), groups_.end(), [](const std::string& name) {
      return !comm::has_cores_to_spare(c10d::resolve_process_group(name));
    });
  std::optional<comm::ForegroundScope> in_turn;
  if (in_foreground_) in_turn.emplace();
  try {
    if (compiled_) {
      const auto program = reinterpret_cast<ProgramFunction>(compiled_->symbol(kProgramSymbol));
      program(&Frame::kInterface, reinterpret_cast<Frame*>(this));
    } else {
      for (const auto& instruction : instructions_) execute(*instruction);
    }
  } catch (c10::Error& error) {
    std::fill(values_.begin(), values_.end(), at::Tensor());
    error.add_context(where());
    throw;
  } catch (...) {
    std::fill(values_.begin(), values_.end(), at::Tensor());
    throw;
  }
  running_ = nullptr;
  shared_.end();
  is_checked_ = true;
  std::vector<at::Tensor> outputs;
  for (const auto value : outputs_)
    outputs.push_back(value == kNoValue ? at::Tensor() : values_[static_cast<size_t>(value)]);
  for (const auto value : outputs_) {
    if (value != kNoValue) values_[static_cast<size_t>(value)].reset();
  }
  for (const auto value : inputs_) values_[static_cast<size_t>(value)].reset();
  return outputs;
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
  return "compile: in " + name_of(running_->op.schema()) +
         (module.empty() ? "" : ", called by " + module) + ", in a compiled program";
}

void Program::execute(const Instruction& instruction) {
  running_ = &instruction;
  if (!shared_.is_empty()) {
    shared_.reach(instruction.node);
    for (const size_t index : instruction.written) {
      for (const auto value : instruction.arguments[index].values) shared_.before_write(value);
    }
  }
  if (!instruction.is_gather || !see_in_place(instruction)) call(instruction);
  if (!is_checked_) {
    for (const auto& values : instruction.results) {
      for (const auto value : values) check_result(instruction, value);
    }
  }
  for (const auto value : instruction.last_used) values_[static_cast<size_t>(value)].reset();
}

/// Whether a gather moves nothing, see Note [seen in place]; what must travel has done so, too.
bool Program::see_in_place(const Instruction& instruction) {
  const auto& from = instruction.arguments[0].values;
  const auto& to = instruction.results[0];
  std::vector<at::Tensor> parts;
  for (const auto value : from) parts.push_back(at(value));
  auto wholes = shared_.open(instruction.node, parts);
  if (wholes.empty()) return false;
  std::vector<at::Tensor> travelling;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!wholes[i].defined()) travelling.push_back(parts[i]);
  }
  std::vector<at::Tensor> arrived;
  if (!travelling.empty()) {
    stack_ = {travelling, instruction.arguments[1].constant, instruction.arguments[2].constant};
    call_boxed(instruction.op, stack_);
    arrived = stack_.back().toTensorVector();
  }
  auto next = arrived.begin();
  for (size_t i = 0; i < to.size(); ++i)
    at(to[i]) = wholes[i].defined() ? std::move(wholes[i]) : std::move(*next++);
  return true;
}

void Program::call(const Instruction& instruction) {
  stack_.clear();
  for (const auto& argument : instruction.arguments) push(argument);
  // What consumed arguments become lies where they lay.
  size_t result = 0;
  for (const size_t index : instruction.written) {
    const auto& from = instruction.arguments[index].values;
    const auto& to = instruction.results[result++];
    for (size_t i = 0; i < from.size(); ++i) {
      if (to[i] != kNoValue)
        values_[static_cast<size_t>(to[i])] = values_[static_cast<size_t>(from[i])];
    }
  }
  {
    const c10::AutoGradMode grad_mode(instruction.asks_grad_mode || c10::GradMode::is_enabled());
    call_boxed(instruction.op, stack_);
  }
  for (const size_t own : instruction.own) {
    const auto& to = instruction.results[result++];
    auto& given = stack_[own];
    if (given.isTensor()) {
      if (to[0] != kNoValue) values_[static_cast<size_t>(to[0])] = std::move(given).toTensor();
    } else {
      const auto list = given.toTensorList();
      for (size_t i = 0; i < to.size(); ++i) {
        if (to[i] != kNoValue) values_[static_cast<size_t>(to[i])] = list.get(i);
      }
    }
  }
}

void Program::make_value(ValueId value) {
  const auto& type = types_[static_cast<size_t>(value)];
  if (const auto sent = sent_.find(value); sent != sent_.end()) {
    at(value) = memory_for(sent->second, type);
    return;
  }
  at(value) =
      at::empty_strided(type.sizes, type.strides, at::TensorOptions(type.device).dtype(type.dtype));
}

void Program::check_result(const Instruction& instruction, ValueId value) const {
  if (value == kNoValue) return;
  const auto& tensor = values_[static_cast<size_t>(value)];
  const auto& type = types_[static_cast<size_t>(value)];
  TORCH_INTERNAL_ASSERT(tensor.defined() && tensor.sizes() == type.sizes &&
                            tensor.scalar_type() == type.dtype && same_strides(tensor, type),
                        "compile: ", instruction.op.schema().name(), " gave sizes ", tensor.sizes(),
                        " and strides ", tensor.strides(), " of ", tensor.scalar_type(), " where ",
                        type.sizes, ", ", type.strides, " of ", type.dtype, " were recorded");
}

}  // namespace tessera::compiler
