#include "dtensor/registration.h"

#include "base/operator_kernels.h"
#include "dtensor/dispatch.h"
#include "dtensor/gather_first.h"
#include "dtensor/part.h"
#include "dtensor/plain_loss.h"
#include "dtensor/reduce_first.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>

namespace tessera::dtensor {
namespace {

using c10::DispatchKey;

/// Composite operators, of backward formulas most, that would write into plain tensors of their
/// making.
constexpr const char* kTakenWhole[] = {"affine_grid_generator_backward",
                                       "value_selecting_reduction_backward", "cummaxmin_backward",
                                       "trace_backward", "one_hot"};

/// Operators, with their overloads, whose derivative looks for the elements that equal the result.
/// See Note [reduced once].
constexpr const char* kReducedFirst[] = {"amax",
                                         "amin",
                                         "aminmax",
                                         "max",
                                         "min",
                                         "median",
                                         "nanmedian",
                                         "linalg_vector_norm",
                                         "norm.Scalar",
                                         "norm.ScalarOpt_dtype",
                                         "norm.ScalarOpt_dim",
                                         "norm.ScalarOpt_dim_dtype",
                                         "dist",
                                         "_cdist_forward",
                                         "_pdist_forward",
                                         "scatter_reduce.two",
                                         "scatter_reduce_.two",
                                         "index_reduce",
                                         "index_reduce_",
                                         "segment_reduce",
                                         "_foreach_norm.Scalar",
                                         "_foreach_max"};

/// Put together, with their derivatives, from operators in place and from plain tensors.
constexpr const char* kGatheredFirst[] = {"quantile", "quantile.scalar", "nanquantile",
                                          "nanquantile.scalar"};

/// See Note [losses stay plain].
constexpr const char* kOfLosses[] = {"add.Tensor",  "sub.Tensor",  "mul.Tensor",  "div.Tensor",
                                     "add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor"};

auto kernel() { return torch::CppFunction::makeFromBoxedFunction<&dispatch>(); }

/// What stays registered until the process ends.
struct Libraries {
  torch::Library fallback{torch::Library::IMPL, "_", kKey, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__};
  torch::Library autograd{torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse3, __FILE__,
                          __LINE__};
  torch::Library autograd_fallback{torch::Library::IMPL, "_", DispatchKey::AutogradPrivateUse3,
                                   __FILE__, __LINE__};
};

/// An operator that its parts would otherwise run for. Those parts knew its derivative; where
/// nobody else does, asking for it is an error.
void take_whole(Libraries& libraries, const std::string& name) {
  libraries.aten.impl(name.c_str(), kernel());
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + name, ""});
  if (!op || op->hasKernelForDispatchKey(DispatchKey::Autograd)) return;
  libraries.autograd.impl(name.c_str(), torch::autograd::autogradNotImplementedFallback());
}

template <auto* Kernel>
void take_above_autograd(Libraries& libraries, const std::string& name) {
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op =
      c10::Dispatcher::singleton().findSchema({"aten::" + name.substr(0, dot), overload});
  if (!op || !op->hasKernelForDispatchKey(DispatchKey::Autograd)) return;  // of another libtorch
  libraries.autograd.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<Kernel>());
}

void take_key() {
  auto& dispatcher = c10::Dispatcher::singleton();
  TORCH_CHECK(!dispatcher.hasBackendFallbackForDispatchKey(kKey),
              "tessera: the dispatch key PrivateUse3, which distributed tensors need, is taken by ",
              "something else in this process");
  auto* libraries = new Libraries;
  libraries->fallback.fallback(kernel());
  // Operators without a derivative, users' own among them, would not get past this key.
  libraries->autograd_fallback.fallback(torch::autograd::autogradNotImplementedFallback());
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !bypasses_fallback(*op)) continue;
    const auto full =
        name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    libraries->aten.impl(full.c_str(), kernel());
  }
  for (const auto* name : kTakenWhole) take_whole(*libraries, name);
  for (const auto* name : kGatheredFirst) {
    libraries->aten.impl(name, kernel());
    libraries->autograd.impl(name, torch::CppFunction::makeFromBoxedFunction<&gather_first>());
  }
  for (const auto* name : kReducedFirst) take_above_autograd<&reduce_first>(*libraries, name);
  for (const auto* name : kOfLosses) take_above_autograd<&keep_loss_plain>(*libraries, name);
}

}  // namespace

void ensure_registered() {
  static std::once_flag once;
  std::call_once(once, take_key);
}

}  // namespace tessera::dtensor
