#include "compiler/record/dispatch_key.h"

#include "base/dispatcher.h"
#include "compiler/record/recorder.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace tessera::compiler {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (auto* recorder = Recorder::current()) return recorder->record(op, *stack);
  const RunScope run;
  call_boxed(op, *stack);
}

auto kernel() { return torch::CppFunction::makeFromBoxedFunction<&dispatch>(); }

/// What stays registered until the process ends.
struct Libraries {
  torch::Library fallback{torch::Library::IMPL, "_", kRecordKey, __FILE__, __LINE__};
  // Tensors of other layouts come with the key too; they end the recording, not the function.
  torch::Library sparse{torch::Library::IMPL, "_", DispatchKey::SparsePrivateUse2, __FILE__,
                        __LINE__};
  torch::Library sparse_csr{torch::Library::IMPL, "_", DispatchKey::SparseCsrPrivateUse2, __FILE__,
                            __LINE__};
  torch::Library nested{torch::Library::IMPL, "_", DispatchKey::NestedTensorPrivateUse2, __FILE__,
                        __LINE__};
  torch::Library quantized{torch::Library::IMPL, "_", DispatchKey::QuantizedPrivateUse2, __FILE__,
                           __LINE__};
  // Operators without a derivative would not get past this key.
  torch::Library autograd{torch::Library::IMPL, "_", DispatchKey::AutogradPrivateUse2, __FILE__,
                          __LINE__};
  std::map<std::pair<std::string, DispatchKey>, torch::Library> by_namespace;

  torch::Library& of(const std::string& name, DispatchKey key) {
    return by_namespace
        .try_emplace({name, key}, torch::Library::IMPL, name, key, __FILE__, __LINE__)
        .first->second;
  }
};

/// Whether GPUs have a kernel of it and all others take it apart, as _fused_rms_norm. Autograd is
/// above: it has chosen between the two when the operator comes here.
bool is_one_on_gpus_alone(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         op.hasKernelForDispatchKey(DispatchKey::CUDA) &&
         !op.hasKernelForDispatchKey(DispatchKey::CPU);
}

void take_key() {
  auto& dispatcher = c10::Dispatcher::singleton();
  TORCH_CHECK(!dispatcher.hasBackendFallbackForDispatchKey(kRecordKey),
              "tessera: the dispatch key PrivateUse2, which the compiler needs, is taken by ",
              "something else in this process");
  auto* libraries = new Libraries;
  for (auto* library : {&libraries->fallback, &libraries->sparse, &libraries->sparse_csr,
                        &libraries->nested, &libraries->quantized})
    library->fallback(kernel());
  libraries->autograd.fallback(torch::CppFunction::makeFallthrough());
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (!bypasses_fallback(*op) && !is_one_on_gpus_alone(*op)) continue;
    const auto split = name.name.find("::");
    const auto full =
        name.name.substr(split + 2) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    for (const auto key :
         {kRecordKey, DispatchKey::SparsePrivateUse2, DispatchKey::SparseCsrPrivateUse2})
      libraries->of(name.name.substr(0, split), key).impl(full.c_str(), kernel());
  }
}

constexpr auto kAboveBackends =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

}  // namespace

void ensure_registered() {
  static std::once_flag once;
  std::call_once(once, take_key);
}

RecordScope::RecordScope() : before_(c10::impl::tls_local_dispatch_key_set()) {
  auto keys = before_;
  keys.included_ = keys.included_ | DispatchKeySet(kRecordKey);
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

RecordScope::~RecordScope() { c10::impl::_force_tls_local_dispatch_key_set(before_); }

RunScope::RunScope() : before_(c10::impl::tls_local_dispatch_key_set()) {
  auto keys = capture::without_recorder(before_);
  keys.excluded_ = keys.excluded_ | kAboveBackends;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

RunScope::~RunScope() { c10::impl::_force_tls_local_dispatch_key_set(before_); }

}  // namespace tessera::compiler
