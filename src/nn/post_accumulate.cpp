#include "nn/post_accumulate.h"

#include <tessera/nn/hooks.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <mutex>

namespace tessera {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
struct GradHook {
  std::function<void(const at::Tensor&)> run;
  uint64_t number;  // no other has it, at any time
};

/// libtorch has one slot per tensor; this owns it and serves any number. A hook that was there
/// before runs first.
class Multiplexer final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Multiplexer(std::unique_ptr<PostAccumulateGradHook> earlier)
      : earlier_(std::move(earlier)) {}

  void operator()(const at::Tensor& tensor) override {
    if (!takes_ || !takes_(tensor)) run(tensor);
  }

  void run(const at::Tensor& tensor) {
    if (earlier_) (*earlier_)(tensor);
    for (const auto& hook : hooks()) hook->run(tensor);
  }

  void intercept(std::function<bool(const at::Tensor&)> takes) { takes_ = std::move(takes); }

  std::shared_ptr<GradHook> add(std::function<void(const at::Tensor&)> hook) {
    static std::atomic<uint64_t> made{0};
    const std::lock_guard lock(mutex_);
    return hooks_.emplace_back(std::make_shared<GradHook>(GradHook{std::move(hook), ++made}));
  }
  uint64_t fingerprint() {
    const std::lock_guard lock(mutex_);
    uint64_t hash = 1;
    for (const auto& hook : hooks_) hash = hash * 0x9E3779B97F4A7C15ULL + hook->number;
    return hash;
  }
  void remove(const std::shared_ptr<GradHook>& hook) {
    const std::lock_guard lock(mutex_);
    std::erase(hooks_, hook);
  }

 private:
  std::vector<std::shared_ptr<GradHook>> hooks() {
    const std::lock_guard lock(mutex_);
    return hooks_;
  }
  std::unique_ptr<PostAccumulateGradHook> earlier_;
  std::function<bool(const at::Tensor&)> takes_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<GradHook>> hooks_;
};

/// Counts the owners of its gradient's memory.
class OwnerCount final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit OwnerCount(size_t& owners) : owners_(owners) {}
  void operator()(const at::Tensor& tensor) override {
    owners_ = tensor.grad().storage().use_count();
  }

 private:
  size_t& owners_;
};

/// Owners of the memory of a gradient that is nobody else's, while hooks run: versions of libtorch
/// differ in whether what is handed over is still there, so a gradient tells.
size_t owners_of_own() {
  static const size_t counted = [] {
    size_t owners = 0;
    const c10::InferenceMode no_inference(false);
    const at::AutoGradMode with_grad(true);
    const auto leaf =
        at::ones({1}, at::TensorOptions(at::kFloat).device(at::kCPU)).requires_grad_();
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<OwnerCount>(owners));
    torch::autograd::backward({leaf * 2}, {});
    return owners;
  }();
  return counted;
}

Multiplexer* find_multiplexer(const at::Tensor& tensor) {
  return dynamic_cast<Multiplexer*>(torch::autograd::impl::post_acc_grad_hooks(tensor).get());
}

Multiplexer& multiplexer_of(const at::Tensor& tensor) {
  namespace impl = torch::autograd::impl;
  if (auto* found = find_multiplexer(tensor)) return *found;
  owners_of_own();  // now, rather than inside the backward that asks for it
  auto made = std::make_unique<Multiplexer>(std::move(impl::post_acc_grad_hooks(tensor)));
  auto& multiplexer = *made;
  impl::set_post_acc_grad_hooks(tensor, std::move(made));
  return multiplexer;
}

}  // namespace

void nn::intercept_gradient(const at::Tensor& tensor,
                            std::function<bool(const at::Tensor&)> takes) {
  multiplexer_of(tensor).intercept(std::move(takes));
}

bool nn::owns_memory(const at::Tensor& gradient) {
  return gradient.storage().use_count() <= owners_of_own();
}

uint64_t nn::fingerprint_of_hooks(const at::Tensor& tensor) {
  auto* multiplexer = find_multiplexer(tensor);
  uint64_t hash = multiplexer == nullptr ? 0 : multiplexer->fingerprint();
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || !meta->cpp_hooks_list_) return hash;
  hash = ~hash * 0x9E3779B97F4A7C15ULL;
  // Places of hooks stay; those that were removed are empty.
  for (const auto& hook : *meta->cpp_hooks_list_)
    hash = hash * 0x9E3779B97F4A7C15ULL + (hook ? 2 : 1);
  return hash;
}

void nn::run_post_accumulate_grad_hooks(const at::Tensor& tensor) {
  if (auto* multiplexer = find_multiplexer(tensor)) multiplexer->run(tensor);
}

HookHandle register_post_accumulate_grad_hook(const at::Tensor& tensor,
                                              std::function<void(const at::Tensor&)> hook) {
  TORCH_CHECK_VALUE(hook,
                    "register_post_accumulate_grad_hook: expected a function, got an empty "
                    "one");
  TORCH_CHECK_VALUE(tensor.defined() && tensor.requires_grad() && tensor.is_leaf(),
                    "register_post_accumulate_grad_hook: expected a leaf that requires grad, got ",
                    !tensor.defined()         ? "an undefined tensor"
                    : !tensor.requires_grad() ? "a tensor that does not; set requires_grad first"
                                              : "the result of an operator; take a parameter");
  const auto added = multiplexer_of(tensor).add(std::move(hook));
  return HookHandle(
      [weak = WeakTensor(tensor.getIntrusivePtr()), added = std::weak_ptr<GradHook>(added)] {
        const auto impl = weak.lock();
        const auto hook = added.lock();
        if (!impl || !hook) return;
        if (auto* owner = find_multiplexer(at::Tensor(impl))) owner->remove(hook);
      });
}

}  // namespace tessera
