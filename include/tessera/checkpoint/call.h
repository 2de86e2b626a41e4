#pragma once

#include <tessera/checkpoint/options.h>
#include <tessera/detail/checkpoint/kept_call.h>

#include <torch/csrc/api/include/torch/nn/modules/container/sequential.h>

namespace tessera {

/// Calls `function` and keeps only its arguments for backward, which calls it again when it first
/// needs a tensor of inside. `function`: anything that can be called, or a module. It and the
/// arguments are copied (what can't be: pass std::ref and keep it alive until backward). Both runs
/// must do the same; gradients are then those of a plain call, bit for bit. Without grad mode it is
/// a plain call. Returns the result by value. Of a module, BatchNorm's running statistics count the
/// batch once; in a function whatever is written outside, these included, is written by both runs.
///   auto y = tessera::checkpoint_call(block, x, mask);
template <class F, class... A>
auto checkpoint_call(CheckpointOptions options, F&& function, A&&... arguments) {
  auto&& callee = detail::checkpoint::callee(std::forward<F>(function));
  if (!detail::checkpoint::is_needed())
    return detail::checkpoint::call(callee, std::forward<A>(arguments)...);
  using Kept = detail::checkpoint::KeptCall<std::decay_t<F>, A...>;
  const auto kept = std::make_shared<Kept>(std::forward<decltype(callee)>(callee), arguments...);
  detail::checkpoint::CallScope scope("checkpoint_call", std::move(options), kept->replay(),
                                      kept->around());
  if constexpr (std::is_void_v<decltype(kept->run_first(std::forward<A>(arguments)...))>) {
    kept->run_first(std::forward<A>(arguments)...);
    scope.succeeded();
  } else {
    auto result = kept->run_first(std::forward<A>(arguments)...);
    scope.succeeded();
    return result;
  }
}

template <class F, class... A>
  requires(!std::same_as<std::remove_cvref_t<F>, CheckpointOptions>)
auto checkpoint_call(F&& function, A&&... arguments) {
  return checkpoint_call(CheckpointOptions(), std::forward<F>(function),
                         std::forward<A>(arguments)...);
}

using SequentialFunctions = std::vector<std::function<at::Tensor(at::Tensor)>>;

/// Calls the functions in turn, each with the result of the one before, as `segments` checkpointed
/// calls; the last segment, whose backward comes first, is a plain one.
at::Tensor checkpoint_sequential(SequentialFunctions functions, int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options = {});
at::Tensor checkpoint_sequential(torch::nn::SequentialImpl& modules, int64_t segments,
                                 at::Tensor input, const CheckpointOptions& options = {});

template <nn::ModuleLike M>
  requires requires(M& modules) {
    { *modules } -> std::convertible_to<torch::nn::SequentialImpl&>;
  }
at::Tensor checkpoint_sequential(M&& modules, int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options = {}) {
  return checkpoint_sequential(static_cast<torch::nn::SequentialImpl&>(*modules), segments,
                               std::move(input), options);
}

}  // namespace tessera
