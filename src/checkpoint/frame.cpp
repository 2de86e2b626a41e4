#include "checkpoint/frame.h"

#include "base/capture.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>

namespace tessera::detail::checkpoint {
namespace {

using torch::autograd::SavedVariableHooks;

constexpr const char* kRemedy =
    "\nBoth runs of a checkpointed call must do the same: look for state that changed in between, "
    "for random numbers with preserve_rng_state = false, and for inputs or weights written to "
    "before backward. CheckpointOptions::debug = true lists the operators of both runs.";

[[noreturn]] void fail(const std::string& text) {
  throw CheckpointError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                        "checkpoint: " + text);
}

/// Ends a recomputation that has all it needs. A std::exception, so that it also passes through a
/// backward that the call itself runs.
struct Stop final : std::exception {
  explicit Stop(const void* ended) : recomputation(ended) {}
  const char* what() const noexcept override {
    return "tessera: end of a recomputation; not an error, let it pass";
  }
  const void* recomputation;
};

std::vector<at::Device> devices_of(const nn::Replay& call) {
  std::vector<at::Device> devices;
  call.for_each_tensor([&](at::Tensor& tensor) {
    if (tensor.defined() && std::ranges::find(devices, tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  });
  return devices;
}

/// The backward this thread works for; a number of its own for a look at saved tensors outside.
int64_t current_backward() {
  static std::atomic<int64_t> outside = 0;
  const int task = torch::autograd::get_current_graph_task_id();
  return task == -1 ? --outside : task;
}

/// In place of a tensor saved by the forward.
class Placeholder final : public SavedVariableHooks {
 public:
  explicit Placeholder(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override { holder_ = frame_->save(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->unpack(*holder_); }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  std::shared_ptr<CheckpointFrame::Holder> holder_;
};

}  // namespace

class CheckpointFrame::Recomputation final : public HookSource {
 public:
  Recomputation(CheckpointFrame& frame, int64_t backward)
      : frame_(frame),
        backward_(backward),
        needed_(frame.options_.early_stop ? frame.count_needed() : frame.holders_.size()) {}

  std::unique_ptr<SavedVariableHooks> make_hooks() override;

  void saved(const at::Tensor& tensor) {
    const size_t index = count_++;
    if (index >= needed_) {
      // Somebody caught the first Stop, or the call saves more than it did.
      if (frame_.options_.early_stop) throw Stop(this);
      return;
    }
    if (frame_.options_.determinism_check != DeterminismCheck::None)
      descriptions_.push_back(SavedDescription::of(tensor, trace_.current()));
    if (const auto holder = frame_.holders_[index].lock(); holder && !holder->find(backward_))
      holder->recomputed.push_back({backward_, tensor.tensor_data(), tensor._version()});
    if (frame_.options_.early_stop && count_ == needed_) throw Stop(this);
  }

 private:
  friend class CheckpointFrame;

  CheckpointFrame& frame_;
  const int64_t backward_;
  const size_t needed_;
  size_t count_ = 0;
  std::vector<SavedDescription> descriptions_;
  OperatorTrace trace_;
};

/// The recomputed graph itself works, too: the call may run a backward of its own.
class CheckpointFrame::SavedAgain final : public SavedVariableHooks {
 public:
  explicit SavedAgain(Recomputation& recomputation) : recomputation_(recomputation) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.tensor_data();
    recomputation_.saved(tensor);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Recomputation& recomputation_;
  at::Tensor tensor_;
};

std::unique_ptr<SavedVariableHooks> CheckpointFrame::Recomputation::make_hooks() {
  return std::make_unique<SavedAgain>(*this);
}

CheckpointFrame::Holder::Recomputed* CheckpointFrame::Holder::find(int64_t backward) {
  const auto found = std::ranges::find(recomputed, backward, &Recomputed::backward);
  return found == recomputed.end() ? nullptr : &*found;
}

void CheckpointFrame::Holder::drop(int64_t backward) {
  std::erase_if(recomputed, [backward](const auto& entry) { return entry.backward == backward; });
}

CheckpointFrame::CheckpointFrame(CheckpointOptions options, nn::Replay again, ScopeFactory around,
                                 ScopeFactory recompute_scope)
    : options_(std::move(options)),
      again_(std::move(again)),
      around_(std::move(around)),
      recompute_scope_(std::move(recompute_scope)),
      state_(options_.preserve_rng_state, devices_of(again_)) {
  again_.for_each_tensor([this](at::Tensor& tensor) {
    inputs_.emplace_back(tensor, /*is_output=*/false);
    tensor.reset();
  });
}

std::unique_ptr<SavedVariableHooks> CheckpointFrame::make_hooks() {
  return std::make_unique<Placeholder>(shared_from_this());
}

std::shared_ptr<CheckpointFrame::Holder> CheckpointFrame::save(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  auto holder = std::make_shared<Holder>();
  holders_.push_back(holder);
  if (options_.determinism_check != DeterminismCheck::None)
    descriptions_.push_back(SavedDescription::of(tensor, forward_trace_.current()));
  return holder;
}

void CheckpointFrame::forward_ended() {
  const std::lock_guard lock(mutex_);
  state_.forward_ended();
  forward_ended_ = true;
}

at::Tensor CheckpointFrame::unpack(Holder& holder) {
  const std::lock_guard lock(mutex_);
  const auto backward = current_backward();
  if (!holder.find(backward)) recompute(backward);
  const auto found = *holder.find(backward);
  const bool outside = backward < 0;
  if (outside) {
    forget(backward);
  } else if (torch::autograd::get_current_graph_task_keep_graph()) {
    holder.drop(backward);
  }
  TORCH_CHECK(found.tensor._version() == found.version,
              "checkpoint: one of the tensors needed for backward, ",
              SavedDescription::of(found.tensor, "").text(),
              ", has been changed in place by the checkpointed call after it was saved (version ",
              found.version, ", now ", found.tensor._version(),
              "); use the operator that is not "
              "in place");
  return found.tensor;
}

size_t CheckpointFrame::count_needed() const {
  const auto last = std::find_if(holders_.rbegin(), holders_.rend(),
                                 [](const auto& holder) { return !holder.expired(); });
  return static_cast<size_t>(holders_.rend() - last);
}

void CheckpointFrame::forget(int64_t backward) {
  const std::lock_guard lock(mutex_);
  for (const auto& weak : holders_) {
    if (const auto holder = weak.lock()) holder->drop(backward);
  }
}

void CheckpointFrame::recompute(int64_t backward) {
  TORCH_CHECK(!is_recomputing_,
              "checkpoint: expected a recomputation not to need its own results, but the call runs "
              "a backward through what an earlier run of it returned");
  Recomputation recomputation(*this, backward);
  try {
    run(recomputation);
  } catch (...) {
    forget(backward);
    throw;
  }
  check(recomputation);
  if (backward >= 0) {
    at_end_of_backward([frame = weak_from_this(), backward] {
      if (const auto alive = frame.lock()) alive->forget(backward);
    });
  }
}

void CheckpointFrame::run(Recomputation& recomputation) {
  // Before anything of this run is in place: it may mean recomputing the frame around this one.
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  {
    const c10::AutoGradMode with_grad(true);  // a copy requires grad where the input does
    for (const auto& input : inputs_) inputs.push_back(capture::again(input.unpack()));
  }

  struct PlacedInputs {
    const CheckpointFrame& frame;
    bool& is_recomputing;
    ~PlacedInputs() {
      frame.again_.for_each_tensor([](at::Tensor& tensor) { tensor.reset(); });
      is_recomputing = false;
    }
  };
  is_recomputing_ = true;
  const PlacedInputs placed{*this, is_recomputing_};
  auto next = inputs.begin();
  again_.for_each_tensor([&](at::Tensor& tensor) { tensor = std::move(*next++); });
  try {
    const auto around = around_ ? around_() : nullptr;
    const c10::AutoGradMode with_grad(true);
    const RunState::Scope state(state_);
    const RepeatedScope repeated;
    const HookScope hooks(recomputation);
    const OperatorTrace::Scope trace(options_.debug ? &recomputation.trace_ : nullptr);
    const auto scope = recompute_scope_ ? recompute_scope_() : nullptr;
    again_();
  } catch (const Stop& stop) {
    if (stop.recomputation != &recomputation) throw;
  }
}

void CheckpointFrame::check(const Recomputation& recomputation) const {
  // A backward inside the call itself, without early stop, goes on to tensors not yet saved.
  const bool went_on = !options_.early_stop && !forward_ended_;
  const bool same_count =
      recomputation.count_ == recomputation.needed_ ||
      (recomputation.count_ > recomputation.needed_ && (options_.early_stop || went_on));
  auto text = describe_differences(descriptions_, recomputation.descriptions_);
  if (same_count && text.empty()) return;
  if (!same_count) {
    text = "\n  the forward saved " + std::to_string(holders_.size()) +
           " tensors for backward, the recomputation " + std::to_string(recomputation.count_) +
           text;
  }
  if (options_.debug) {
    text += "\nOperators of the forward:" + forward_trace_.text() +
            "\nOperators of the recomputation:" + recomputation.trace_.text();
  }
  fail("the recomputation did not repeat the forward" + text + kRemedy);
}

}  // namespace tessera::detail::checkpoint
