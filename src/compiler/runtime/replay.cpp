#include "compiler/runtime/replay.h"

#include <tessera/compile/config.h>
#include <tessera/compile/pass.h>

#include "base/devices.h"
#include "base/storage.h"
#include "comm/backend_interfaces.h"
#include "compiler/ir/operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

constexpr int kMostCaptures = 8;

bool has_generator(const Node& node) {
  return std::ranges::any_of(node.arguments, [](const Argument& argument) {
    return argument.kind == Argument::Kind::Constant && argument.constant.isGenerator();
  });
}

comm::Capturable* find_backend(const std::string& group) {
  return comm::find_capturable(*c10d::resolve_process_group(group));
}

c10::intrusive_ptr<c10d::Backend> backend_of(const std::string& group) {
  return c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CUDA);
}

}  // namespace

class Replay::Token final : public comm::CapturedGraph {
 public:
  explicit Token(Replay& replay) : replay_(replay) {}
  void release() override { replay_.release(); }

 private:
  Replay& replay_;
};

Replay::~Replay() = default;

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
  std::string group;
  for (const Node& node : graph.nodes) {
    if (is_launch(node)) {
      if (!compile_config().capture_collectives)
        return "it communicates; ConfigPatch({.capture_collectives = true}) captures that, too";
      if (find_backend(group_of(node)) == nullptr)
        return "it communicates by a backend whose collectives can't be captured: NCCL's can";
      // Graphs of several communicators, beside calls that are not captured, may wait for each
      // other.
      if (group.empty()) group = group_of(node);
      if (group != group_of(node)) return "it communicates in several groups";
    }
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
  for (const auto& node : graph.nodes) {
    if (!is_launch(node)) continue;
    group_ = group_of(node);
    ++collectives_;
  }
  graph_ = CudaGraph::make(types_.empty() ? graph.type(0).device : types_[0].device);
  if (!graph_) why_not_ = "this build of Tessera is without CUDA";
}

bool Replay::is_own(size_t input) const {
  return inputs_[input].kind == InputKind::Argument || inputs_[input].kind == InputKind::Gradient;
}

/// Whether the graph is for these inputs, and for the communicator that there is.
bool Replay::is_current(const std::vector<at::Tensor>& inputs) const {
  if (collectives_ > 0 && captured_with_.lock() != backend_of(group_)) return false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_own(i) && inputs[i].const_data_ptr() != addresses_[i]) return false;
  }
  return true;
}

/// How many handles of a gradient's memory are the graph's own: where there are more, somebody
/// holds it.
void Replay::count_own_handles() {
  std::unordered_map<const c10::StorageImpl*, std::unordered_set<const c10::TensorImpl*>> handles;
  for (const auto* tensors : {&captured_inputs_, &captured_outputs_}) {
    for (const auto& tensor : *tensors)
      if (tensor.defined())
        handles[tensor.storage().unsafeGetStorageImpl()].insert(tensor.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < own_handles_.size(); ++i) {
    if (own_handles_[i] > 0)
      own_handles_[i] = handles[captured_outputs_[i].storage().unsafeGetStorageImpl()].size();
  }
}

/// Their memory is the graph's again. Returns how many there were; those of a bucket share memory.
int64_t Replay::free_held_gradients() {
  using Storage = const c10::StorageImpl*;
  std::unordered_map<Storage, at::Tensor> held;
  int64_t count = 0;
  for (size_t i = 0; i < own_handles_.size(); ++i) {
    const auto& output = captured_outputs_[i];
    if (own_handles_[i] == 0 || output.storage().use_count() == own_handles_[i]) continue;
    held.emplace(output.storage().unsafeGetStorageImpl(), output);
    ++count;
  }
  if (held.empty()) return 0;
  // Who holds them may read them on another stream, before and after.
  const auto device = held.begin()->second.device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeDevice(device.index());
  std::unordered_map<Storage, at::Tensor> copies;
  for (const auto& [storage, tensor] : held) copies.emplace(storage, storage_bytes(tensor).clone());
  guard.synchronizeDevice(device.index());
  // From here on nothing throws. All who hold a storage have the copy; a new one has the memory.
  std::unordered_map<Storage, c10::Storage> moved;
  for (const auto& [storage, tensor] : held) {
    const auto& given = tensor.storage();
    auto memory = given.set_data_ptr(copies.at(storage).storage().set_data_ptr({nullptr, device}));
    moved.emplace(storage,
                  c10::Storage(c10::Storage::use_byte_size_t(), given.nbytes(), std::move(memory)));
  }
  for (auto* tensors : {&captured_inputs_, &captured_outputs_}) {
    for (auto& tensor : *tensors) {
      if (!tensor.defined()) continue;
      const auto found = moved.find(tensor.storage().unsafeGetStorageImpl());
      if (found == moved.end()) continue;
      tensor = at::empty({0}, tensor.options())
                   .set_(found->second, tensor.storage_offset(), tensor.sizes(), tensor.strides());
    }
  }
  count_own_handles();  // one tensor that stood in two places is two now
  return count;
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
  if (collectives_ > 0) {
    if (!token_) token_ = std::make_shared<Token>(*this);
    find_backend(group_)->note_capture(token_, collectives_);
    captured_with_ = backend_of(group_);
  }
  // Whose last handle is a program's, who used the tensor has another by now: none is held here.
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_own(i)) captured_inputs_[i].reset();
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i] == OutputKind::Write) captured_outputs_[i].reset();  // it may be an input
  }
  own_handles_.clear();
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto& output = captured_outputs_[i];
    const bool lies_outside = std::ranges::any_of(inputs, [&](const at::Tensor& input) {
      return output.defined() && same_storage(output, input);
    });
    own_handles_.push_back(outputs_[i] == OutputKind::Gradient && output.defined() &&
                           !lies_outside);
  }
  count_own_handles();
}

std::vector<at::Tensor> Replay::hand_out(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> given;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i] == OutputKind::Write) {
      const auto& target = inputs[targets_[i]];
      // Gradients that are added to; all else was written where it lies.
      if (is_own(targets_[i])) target.copy_(captured_inputs_[targets_[i]]);
      given.push_back(target);
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
  own_handles_.clear();
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

void Replay::give_up(std::string why) {
  why_not_ = std::move(why);
  graph_.reset();
  own_handles_.clear();
  captured_inputs_.clear();
  captured_outputs_.clear();
  captures_ = kMostCaptures + 1;
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
  auto* backend = collectives_ > 0 ? find_backend(group_) : nullptr;
  if (collectives_ > 0 && backend == nullptr) {  // that of a world that came later
    give_up("it communicates by a backend whose collectives can't be captured");
    return run_(inputs);
  }
  if (state_ == State::Replay && !is_current(inputs)) drop_capture();
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
      give_up(error.what_without_backtrace());
      return run_(inputs);
    }
  }
  copy_in(inputs);
  graph_->replay();
  if (backend != nullptr) backend->note_replay(collectives_);
  ++counters()["cuda_graph_replays"];
  return hand_out(inputs);
}

}  // namespace tessera::compiler
