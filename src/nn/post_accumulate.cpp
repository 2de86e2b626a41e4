#include <tessera/nn/hooks.h>

#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace tessera {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using GradHook = std::function<void(const at::Tensor&)>;

/// libtorch has one slot per tensor; this owns it and serves any number. A hook that was there
/// before runs first.
class Multiplexer final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Multiplexer(std::unique_ptr<PostAccumulateGradHook> earlier)
      : earlier_(std::move(earlier)) {}

  void operator()(const at::Tensor& tensor) override {
    if (earlier_) (*earlier_)(tensor);
    for (const auto& hook : hooks()) (*hook)(tensor);
  }

  std::shared_ptr<GradHook> add(GradHook hook) {
    const std::lock_guard lock(mutex_);
    return hooks_.emplace_back(std::make_shared<GradHook>(std::move(hook)));
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
  std::mutex mutex_;
  std::vector<std::shared_ptr<GradHook>> hooks_;
};

}  // namespace

HookHandle register_post_accumulate_grad_hook(const at::Tensor& tensor, GradHook hook) {
  TORCH_CHECK_VALUE(hook,
                    "register_post_accumulate_grad_hook: expected a function, got an empty "
                    "one");
  TORCH_CHECK_VALUE(tensor.defined() && tensor.requires_grad() && tensor.is_leaf(),
                    "register_post_accumulate_grad_hook: expected a leaf that requires grad, got ",
                    !tensor.defined()         ? "an undefined tensor"
                    : !tensor.requires_grad() ? "a tensor that does not; set requires_grad first"
                                              : "the result of an operator; take a parameter");
  namespace impl = torch::autograd::impl;
  auto* multiplexer = dynamic_cast<Multiplexer*>(impl::post_acc_grad_hooks(tensor).get());
  if (multiplexer == nullptr) {
    auto made = std::make_unique<Multiplexer>(std::move(impl::post_acc_grad_hooks(tensor)));
    multiplexer = made.get();
    impl::set_post_acc_grad_hooks(tensor, std::move(made));
  }
  const auto added = multiplexer->add(std::move(hook));
  return HookHandle(
      [weak = WeakTensor(tensor.getIntrusivePtr()), added = std::weak_ptr<GradHook>(added)] {
        const auto impl = weak.lock();
        const auto hook = added.lock();
        if (!impl || !hook) return;
        const auto tensor = at::Tensor(impl);
        auto* owner = dynamic_cast<Multiplexer*>(impl::post_acc_grad_hooks(tensor).get());
        if (owner) owner->remove(hook);
      });
}

}  // namespace tessera
