#include "compiler/runtime/replay.h"

#include <tessera/compile/pass.h>

#include "base/device_streams.h"
#include "base/same_storage.h"
#include "comm/capturable.h"
#include "compiler/ir/operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <unordered_map>

namespace tessera::compiler {
namespace {

constexpr int kMostCaptures = 8;

bool has_generator(const Node& node) {
  return std::ranges::any_of(node.arguments, [](const Argument& argument) {
    return argument.kind == Argument::Kind::Constant && argument.constant.isGenerator();
  });
}

/// Gives all who hold the tensor's storage other memory, with what it holds. Returns a storage with
/// the memory that it had.
c10::Storage move_out(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto copy = whole_storage(tensor).clone();
  auto memory = storage.set_data_ptr(copy.storage().set_data_ptr({nullptr, tensor.device()}));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory)};
}

}  // namespace

std::string Replay::objection_to(const Graph& graph) {
  std::optional<c10::Device> device;
  for (size_t value = 0; value < graph.value_count(); ++value) {
    const auto& found = graph.type(static_cast<ValueId>(value)).device;
    // What the host computes would be that of the capture at every replay.
    if (!found.is_cuda()) return "it has tensors on the CPU";
    if (device && *device != found) return "it has tensors on several GPUs";
    device = found;
  }
  if (!device) return "it has no tensors";
  for (const Node& node : graph.nodes) {
    if (is_launch(node) && !comm::find_capturable(*c10d::resolve_process_group(group_of(node))))
      return "it communicates by a backend whose collectives can't be captured: NCCL's can";
    if (has_generator(node)) return "it draws from a generator of its own, in " + node.op;
  }
  for (const GraphOutput& output : graph.outputs) {
    const auto target = std::ranges::find(graph.inputs, output.target, &GraphInput::value);
    if (output.kind == OutputKind::Write && target->kind == InputKind::Argument)
      return "it writes " + target->name;
  }
  return {};
}

Replay::Replay(const Graph& graph, Run run)
    : inputs_(graph.inputs), run_(std::move(run)), why_not_(objection_to(graph)) {
  for (const auto& input : inputs_) types_.push_back(graph.type(input.value));
  for (const auto& output : graph.outputs) {
    outputs_.push_back(output.kind);
    const auto target = std::ranges::find(inputs_, output.target, &GraphInput::value);
    targets_.push_back(static_cast<size_t>(target - inputs_.begin()));
  }
  for (const auto& node : graph.nodes) {
    if (is_launch(node)) ++collectives_[group_of(node)];
  }
  if (!why_not_.empty()) return;
  graph_ = CudaGraph::make(types_.empty() ? graph.type(0).device : types_[0].device);
  if (!graph_) why_not_ = "this build of Tessera is without CUDA";
}

bool Replay::is_own(size_t input) const {
  return inputs_[input].kind == InputKind::Argument || inputs_[input].kind == InputKind::Gradient;
}

bool Replay::lies_as_captured(const std::vector<at::Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_own(i) && inputs[i].const_data_ptr() != addresses_[i]) return false;
  }
  return true;
}

/// Their memory is the graph's again. Returns how many there were; those of a bucket share memory.
int64_t Replay::free_held_gradients() {
  std::unordered_map<const c10::StorageImpl*, size_t> here;  // handles of each
  for (const auto* tensors : {&captured_inputs_, &captured_outputs_}) {
    for (const auto& tensor : *tensors)
      if (tensor.defined()) ++here[tensor.storage().unsafeGetStorageImpl()];
  }
  int64_t count = 0;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> moved;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    auto& output = captured_outputs_[i];
    if (outputs_[i] != OutputKind::Gradient || !output.defined()) continue;
    const auto* storage = output.storage().unsafeGetStorageImpl();
    if (!moved.contains(storage)) {
      if (output.storage().use_count() == here[storage]) continue;
      moved.emplace(storage, move_out(output));
    }
    output =
        at::empty({0}, output.options())
            .set_(moved.at(storage), output.storage_offset(), output.sizes(), output.strides());
    ++count;
  }
  return count;
}

void Replay::note_collectives() const {
  for (const auto& [group, count] : collectives_)
    comm::find_capturable(*c10d::resolve_process_group(group))->note_replay(count);
}

void Replay::copy_in(const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_own(i)) captured_inputs_[i].copy_(inputs[i], /*non_blocking=*/true);
  }
}

void Replay::capture(const std::vector<at::Tensor>& inputs) {
  captured_inputs_ = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& type = types_[i];
    if (is_own(i))
      captured_inputs_[i] = at::empty_strided(type.sizes, type.strides,
                                              at::TensorOptions(type.device).dtype(type.dtype));
  }
  addresses_.clear();
  for (const auto& input : captured_inputs_) addresses_.push_back(input.const_data_ptr());
  ++captures_;
  ++counters()["cuda_graph_captures"];
  graph_->capture([&] { captured_outputs_ = run_(captured_inputs_); });
  // Whose last handle is a program's, who used the tensor has another by now: none is held here.
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_own(i)) captured_inputs_[i].reset();
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i] == OutputKind::Write) captured_outputs_[i].reset();  // it may be an input
  }
}

std::vector<at::Tensor> Replay::hand_out(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> given;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i] == OutputKind::Write) {
      given.push_back(inputs[targets_[i]]);  // where it was written
      continue;
    }
    const auto& output = captured_outputs_[i];
    const bool is_copied = output.defined() && outputs_[i] == OutputKind::Result;
    given.push_back(is_copied ? output.clone() : output.defined() ? output.detach() : output);
  }
  return given;
}

void Replay::drop_capture() {
  try {
    free_held_gradients();
  } catch (const c10::OutOfMemoryError&) {
    // What is held keeps the graph's memory.
  }
  captured_inputs_.clear();
  captured_outputs_.clear();
  graph_->release();
  state_ = State::Capture;
}

void Replay::release() {
  if (state_ != State::Replay) return;
  drop_capture();
  --captures_;  // it was not for where its tensors lay
}

std::vector<at::Tensor> Replay::run(const std::vector<at::Tensor>& inputs) {
  if (!graph_) return run_(inputs);
  if (state_ == State::Plain) {
    state_ = State::WarmUp;
    return run_(inputs);
  }
  if (state_ == State::WarmUp) {
    state_ = State::Capture;
    std::vector<at::Tensor> outputs;
    graph_->warm_up([&] { outputs = run_(inputs); });
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto& output = outputs[i];
      if (output.defined() && outputs_[i] != OutputKind::Write)  // those lie in inputs
        output.record_stream(current_stream(output.device()));
    }
    return outputs;
  }
  if (state_ == State::Replay && !lies_as_captured(inputs)) drop_capture();
  if (state_ == State::Replay) {
    if (const auto count = free_held_gradients(); count > 0)
      counters()["cuda_graph_moved_gradients"] += count;
  }
  if (state_ == State::Capture) {
    try {
      TORCH_CHECK(captures_ < kMostCaptures, "its tensors lie elsewhere at each call");
      capture(inputs);
      state_ = State::Replay;
    } catch (const c10::Error& error) {
      why_not_ = error.what_without_backtrace();
      graph_.reset();
      captured_inputs_.clear();
      captured_outputs_.clear();
      return run_(inputs);
    }
  }
  copy_in(inputs);
  graph_->replay();
  note_collectives();
  ++counters()["cuda_graph_replays"];
  return hand_out(inputs);
}

}  // namespace tessera::compiler
