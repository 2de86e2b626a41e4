#include <tessera/checkpoint/selective.h>

#include "base/dispatcher.h"
#include "checkpoint/run_state.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace tessera::detail::checkpoint {

/// Results of operators that one checkpointed call keeps, by operator and number of its call.
///
/// Note [kept results and in-place operators]
/// What is kept shares memory with what the call goes on with, and the call may write to it: a
/// Linear on 3-D input adds its bias in place to a matrix product, through a view that autograd
/// does not know as one. So a kept result is copied before an operator of the call writes to its
/// memory. Writes after the call show in the version of the tensor.
class CachedResults {
 public:
  explicit CachedResults(SelectivePolicy policy) : policy_(std::move(policy)) {}

  /// Runs the operator and keeps what the policy says.
  void run_and_keep(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  /// The calls of one recomputation.
  class Reader {
   public:
    explicit Reader(CachedResults& results) : results_(results) {}
    /// Puts the kept results in place of the arguments, or runs the operator.
    void take_or_run(const c10::OperatorHandle& op, torch::jit::Stack& stack);

   private:
    CachedResults& results_;
    std::unordered_map<c10::OperatorHandle, size_t> next_;
  };

 private:
  struct Result {
    c10::IValue value;
    int64_t version;  // of a tensor when it was kept
  };
  /// One call; without results: to be run again.
  struct Call {
    std::vector<Result> results;
    std::optional<RandomState> random_after;
  };
  static void take(const c10::OperatorHandle& op, const Call& call, torch::jit::Stack& stack);
  void keep(Call& call, const c10::IValue& result);
  /// Copies what is kept in the memory that the operator is going to write to.
  void make_way(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  SelectivePolicy policy_;
  std::unordered_map<c10::OperatorHandle, std::vector<Call>> calls_;
  std::unordered_set<const c10::StorageImpl*> memory_;  // of what is or was kept
};

namespace {

/// The same memory and version, but unknown to autograd, which writes into the result it gets.
at::Tensor share(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/true));
}

c10::IValue share(const c10::IValue& value) {
  if (value.isTensor()) return share(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> copy;
    for (const at::Tensor& tensor : value.toTensorVector()) copy.push_back(share(tensor));
    return copy;
  }
  return value;
}

void for_each_tensor(const c10::IValue& value,
                     const std::function<void(const at::Tensor&)>& visit) {
  const auto visit_defined = [&visit](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  if (value.isTensor()) visit_defined(value.toTensor());
  if (value.isTensorList()) std::ranges::for_each(value.toTensorVector(), visit_defined);
}

int64_t version_of(const c10::IValue& value) {
  int64_t version = 0;
  for_each_tensor(value, [&version](const at::Tensor& tensor) { version += tensor._version(); });
  return version;
}

/// Null for tensors of other kinds, whose memory is not known.
const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool has_memory(const c10::IValue& value, const c10::StorageImpl* memory) {
  bool found = false;
  for_each_tensor(value, [&](const at::Tensor& tensor) { found |= memory_of(tensor) == memory; });
  return found;
}

c10::IValue copy(const c10::IValue& value) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (value.isTensor()) return value.toTensor().clone();
  c10::List<at::Tensor> copies;
  for (const at::Tensor& tensor : value.toTensorVector())
    copies.push_back(tensor.defined() ? tensor.clone() : tensor);
  return copies;
}

/// Views share memory with an argument and writing operators have to write: both always run.
bool can_be_kept(const c10::FunctionSchema& schema) {
  return !schema.is_mutable() && !schema.returns().empty() &&
         std::ranges::none_of(schema.returns(),
                              [](const c10::Argument& result) { return result.alias_info(); });
}

std::vector<at::Device> devices_of(const torch::jit::Stack& values) {
  std::vector<at::Device> devices;
  for (const auto& value : values) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto device = value.toTensor().device();
    if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
  }
  return devices;
}

}  // namespace

void CachedResults::keep(Call& call, const c10::IValue& result) {
  call.results.push_back({share(result), version_of(result)});
  for_each_tensor(result, [this](const at::Tensor& tensor) { memory_.insert(memory_of(tensor)); });
}

void CachedResults::make_way(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for_each_tensor(arguments[i], [this](const at::Tensor& written) {
      if (!memory_.contains(memory_of(written))) return;
      for (auto& [kept_op, calls] : calls_) {
        for (auto& call : calls) {
          for (auto& result : call.results) {
            if (!has_memory(result.value, memory_of(written))) continue;
            result.value = copy(result.value);
            result.version = version_of(result.value);
          }
        }
      }
      memory_.erase(memory_of(written));
    });
  }
}

void CachedResults::run_and_keep(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (op.schema().is_mutable()) make_way(op, stack);
  call_boxed(op, stack);
  if (!can_be_kept(op.schema())) return;
  auto& call = calls_[op].emplace_back();
  const auto decision = policy_(op.operator_name());
  if (decision != CheckpointPolicy::MustSave && decision != CheckpointPolicy::PreferSave) return;
  const auto results = torch::jit::last(stack, op.schema().returns().size());
  if (std::ranges::any_of(results, [](const auto& value) { return has_memory(value, nullptr); }))
    return;
  for (const auto& result : results) keep(call, result);
  // Whoever draws next in a recomputation that skips this operator must draw what it drew.
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    call.random_after = RandomState::of(devices_of(results.vec()));
}

void CachedResults::take(const c10::OperatorHandle& op, const Call& call,
                         torch::jit::Stack& stack) {
  for (const auto& result : call.results) {
    TORCH_CHECK(version_of(result.value) == result.version,
                "checkpoint: expected the kept result of ", op.operator_name(),
                " to be unchanged until backward, but it has been written to in place after the "
                "call; recompute this operator, or use the one that is not in place");
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const auto& result : call.results) stack.push_back(share(result.value));
  if (call.random_after && RunState::replays_random()) call.random_after->restore();
}

void CachedResults::Reader::take_or_run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (op.schema().is_mutable()) results_.make_way(op, stack);
  if (!can_be_kept(op.schema())) return call_boxed(op, stack);
  const auto index = next_[op]++;
  const auto calls = results_.calls_.find(op);
  // Called more often than by the forward: the check of what is saved tells if that matters.
  if (calls == results_.calls_.end() || index >= calls->second.size()) return call_boxed(op, stack);
  auto& call = calls->second[index];
  if (call.results.empty()) return call_boxed(op, stack);
  take(op, call, stack);
  // From here on the recomputed graph owns the result; a later backward, if any, runs the operator.
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    call = {};
    return;
  }
  // The recomputation may write to what it was given.
  for (const auto& result : call.results) {
    for_each_tensor(result.value, [this](const at::Tensor& tensor) {
      results_.memory_.insert(memory_of(tensor));
    });
  }
}

}  // namespace tessera::detail::checkpoint

namespace tessera {
namespace detail::checkpoint {
namespace {

/// Note [key below autograd]
/// A key between autograd and the kernels that every operator passes while a thread includes it:
/// no backend's, so one fallback serves all operators, and composite ones arrive as their parts.
/// libtorch registers nothing for it; tensors never carry it.
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

class CachingMode final : public Interceptor {
 public:
  explicit CachingMode(std::shared_ptr<CachedResults> results) : results_(std::move(results)) {}

 private:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    results_->run_and_keep(op, stack);
  }
  std::shared_ptr<CachedResults> results_;
};

class CachedMode final : public Interceptor {
 public:
  explicit CachedMode(std::shared_ptr<CachedResults> results)
      : results_(std::move(results)), reader_(*results_) {}

 private:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    reader_.take_or_run(op, stack);
  }
  std::shared_ptr<CachedResults> results_;
  CachedResults::Reader reader_;
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
}  // namespace detail::checkpoint

SelectivePolicy::SelectivePolicy(Decide decide) : decide_(std::move(decide)) {
  TORCH_CHECK_VALUE(decide_, "SelectivePolicy: expected a function, got an empty one");
}

SelectivePolicy::SelectivePolicy(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    TORCH_CHECK_VALUE(detail::checkpoint::exists(name),
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
  detail::checkpoint::require_key();
  return [policy = std::move(policy)]() -> CheckpointContexts {
    auto results = std::make_shared<detail::checkpoint::CachedResults>(policy);
    return {[results] { return std::make_shared<detail::checkpoint::CachingMode>(results); },
            [results] { return std::make_shared<detail::checkpoint::CachedMode>(results); }};
  };
}

}  // namespace tessera
