#pragma once

#include <tessera/replicate.h>

namespace tessera {

struct DistributedDataParallelOptions {
  std::optional<int64_t> device_id = std::nullopt;
  bool broadcast_buffers = true;
  bool init_sync = true;
  Group group = {};
  std::optional<double> bucket_cap_mb = std::nullopt;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// See ReplicateOptions.
  std::vector<std::string> delay_all_reduce_named_params = {};
  std::string param_to_hook_all_reduce = {};
  std::optional<DDPMixedPrecision> mixed_precision = std::nullopt;
};

namespace detail {

/// What the wrapper does around the calls of a module that has no hooks of its own.
class WrappedCalls {
 public:
  WrappedCalls(torch::nn::Module& module, const DistributedDataParallelOptions& options);
  void before(c10::function_ref<void(nn::TensorVisitor)> for_each_input);
  void after(c10::function_ref<void(nn::TensorVisitor)> for_each_output);

 private:
  std::shared_ptr<ReplicateState> state_;
};

}  // namespace detail

/// `replicate` as a wrapper, for those who know it by that name: the wrapped module is its child
/// `module`, calls go through the wrapper, buffers follow rank 0's. Takes plain libtorch modules as
/// well as hookable ones. The constructor is a collective.
///   tessera::DistributedDataParallel ddp(net);   auto loss = ddp(x).sum();
template <class M>
  requires(!std::derived_from<M, torch::nn::Module>)
class DistributedDataParallel : public torch::nn::Module {
 public:
  explicit DistributedDataParallel(M module, const DistributedDataParallelOptions& options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module_(std::move(module)),
        calls_(*module_, options) {
    register_module("module", pointer(module_));
  }

  template <class... A>
  auto forward(A&&... arguments) {
    std::tuple<std::decay_t<A>...> values(std::forward<A>(arguments)...);
    calls_.before([&](nn::TensorVisitor visit) { nn::visit_tensors(values, visit); });
    auto result = std::apply([&](auto&... each) { return module_->forward(each...); }, values);
    calls_.after([&](nn::TensorVisitor visit) { nn::visit_tensors(result, visit); });
    return result;
  }
  template <class... A>
  auto operator()(A&&... arguments) {
    return forward(std::forward<A>(arguments)...);
  }

  M& module() { return module_; }
  /// Members of the wrapped module.
  auto* operator->() { return &*module_; }
  NoSync no_sync() { return NoSync(*module_); }
  Join join(JoinOptions options = {}) { return Join(*module_, options); }
  void register_comm_hook(CommHook hook) { tessera::register_comm_hook(*module_, std::move(hook)); }

 private:
  static auto pointer(const M& module) {
    if constexpr (requires { module.ptr(); })
      return module.ptr();
    else
      return module;
  }

  M module_;
  detail::WrappedCalls calls_;
};

}  // namespace tessera
