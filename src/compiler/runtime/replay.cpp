#include "compiler/runtime/replay.h"

#include <tessera/compile/pass.h>

#include "base/device_streams.h"
#include "compiler/ir/operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

constexpr int kMostCaptures = 8;

bool has_generator(const Node& node) {
  return std::ranges::any_of(node.arguments, [](const Argument& argument) {
    return argument.kind == Argument::Kind::Constant && argument.constant.isGenerator();
  });
}

/// To memory that is not the graph's, under all who hold it. Without memory for that it stays.
void move_out(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto bytes = at::empty({0}, tensor.options().dtype(at::kByte))
                         .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
  try {
    const auto copy = bytes.clone();
    storage.set_data_ptr(copy.storage().set_data_ptr({nullptr, tensor.device()}));
  } catch (const c10::OutOfMemoryError&) {
    // The graph's memory is kept with it.
  }
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
    if (is_launch(node)) return "it communicates";
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

bool Replay::is_gradient_held() const {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto& output = captured_outputs_[i];
    if (outputs_[i] == OutputKind::Gradient && output.defined() && output.storage().use_count() > 1)
      return true;
  }
  return false;
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
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto& output = captured_outputs_[i];
    if (outputs_[i] != OutputKind::Gradient || !output.defined()) continue;
    if (output.storage().use_count() > 1) move_out(output);
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
    for (const auto& output : outputs) {
      if (output.defined()) output.record_stream(current_stream(output.device()));
    }
    return outputs;
  }
  if (state_ == State::Replay && !lies_as_captured(inputs)) drop_capture();
  if (state_ == State::Replay && is_gradient_held()) {
    ++counters()["cuda_graph_skips"];
    return run_(inputs);
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
  ++counters()["cuda_graph_replays"];
  return hand_out(inputs);
}

}  // namespace tessera::compiler
