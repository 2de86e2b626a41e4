#include <tessera/checkpoint/selective.h>

#include "checkpoint/kept_results.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

namespace tessera {
namespace recompute {
namespace {

/// Note [key below autograd]
/// A key between autograd and the kernels that every operator passes while a thread includes it:
/// no backend's, so one fallback serves all operators, and composite ones arrive as their parts.
/// libtorch 2.11 to 2.13 register nothing for it; tensors never carry it.
constexpr auto kKey = c10::DispatchKey::Fake;

/// Gets the operators of this thread while it exists.
class Interceptor {
 public:
  Interceptor() : outer_(current) { current = this; }
  virtual ~Interceptor() { current = outer_; }
  Interceptor(const Interceptor&) = delete;
  Interceptor& operator=(const Interceptor&) = delete;

  static void intercept(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto* const self = current;
    if (!self) {
      // Autograd's device threads take over the key of the thread that called backward, but not
      // its interceptor.
      const c10::impl::ExcludeDispatchKeyGuard below(kKey);
      op.callBoxed(stack);
      return;
    }
    // What the operator does inside is the outer interceptor's, if anybody's.
    struct Restore {
      Interceptor* self;
      ~Restore() { current = self; }
    };
    const Restore restore{self};
    current = self->outer_;
    std::optional<c10::impl::ExcludeDispatchKeyGuard> below;
    if (!current) below.emplace(kKey);
    self->run(op, *stack);
  }

 protected:
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;

 private:
  static thread_local Interceptor* current;
  Interceptor* outer_;
  c10::impl::IncludeDispatchKeyGuard include_{kKey};
};

thread_local Interceptor* Interceptor::current = nullptr;

class Keeping final : public Interceptor {
 public:
  explicit Keeping(std::shared_ptr<KeptResults> results) : results_(std::move(results)) {}

 private:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    results_->run_and_keep(op, stack);
  }
  std::shared_ptr<KeptResults> results_;
};

class Taking final : public Interceptor {
 public:
  explicit Taking(std::shared_ptr<KeptResults> results)
      : results_(std::move(results)), reader_(*results_) {}

 private:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    reader_.take_or_run(op, stack);
  }
  std::shared_ptr<KeptResults> results_;
  KeptResults::Reader reader_;
};

void require_key() {
  static const bool kClaimed = [] {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey),
        "selective_contexts: expected the dispatch key ", kKey,
        " to be free, but something else in this process has claimed it");
    static auto& library = *new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&Interceptor::intercept>());
    return true;
  }();
  (void)kClaimed;
}

bool exists(const std::string& name) {
  const auto names = c10::Dispatcher::singleton().getAllOpNames();
  return std::ranges::any_of(names, [&](const c10::OperatorName& op) {
    return op.name == name || c10::toString(op) == name;
  });
}

}  // namespace
}  // namespace recompute

SelectivePolicy::SelectivePolicy(Decide decide) : decide_(std::move(decide)) {
  TORCH_CHECK_VALUE(decide_, "SelectivePolicy: expected a function, got an empty one");
}

SelectivePolicy::SelectivePolicy(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    TORCH_CHECK_VALUE(recompute::exists(name),
                      "SelectivePolicy: expected the name of an operator, as \"aten::mm\" or "
                      "\"aten::add.Tensor\", got \"",
                      name, "\"");
  }
  decide_ = [kept =
                 std::set<std::string>(names.begin(), names.end())](const c10::OperatorName& op) {
    const bool listed = kept.contains(op.name) || kept.contains(c10::toString(op));
    return listed ? CheckpointPolicy::MustSave : CheckpointPolicy::PreferRecompute;
  };
}

SelectivePolicy save_matmul_results() {
  static const std::set<std::string> kNames = {
      "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::convolution"};
  return SelectivePolicy([](const c10::OperatorName& op) {
    const bool kept = kNames.contains(op.name) || op.name.starts_with("aten::_scaled_dot_product_");
    return kept ? CheckpointPolicy::PreferSave : CheckpointPolicy::PreferRecompute;
  });
}

std::function<CheckpointContexts()> selective_contexts(SelectivePolicy policy) {
  recompute::require_key();
  return [policy = std::move(policy)]() -> CheckpointContexts {
    auto results = std::make_shared<recompute::KeptResults>(policy);
    return {[results] { return std::make_shared<recompute::Keeping>(results); },
            [results] { return std::make_shared<recompute::Taking>(results); }};
  };
}

}  // namespace tessera
