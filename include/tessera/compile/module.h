#pragma once

#include <tessera/compile/explain.h>
#include <tessera/compile/options.h>
#include <tessera/nn/module_ref.h>

#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>

namespace tessera {

namespace detail {

/// Runs the forwards of a module, or programs made of them.
class CompiledForward {
 public:
  CompiledForward(torch::nn::Module& module, CompileOptions options);
  ~CompiledForward();

  void run(c10::function_ref<void()> forward);
  std::string explain(const ExplainOptions& options = {}) const;
  std::string generated_code() const;
  std::string program_graph() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// A module whose forward runs as a program; see compile(). It refers to the module and stands for
/// it wherever one is expected: `optim::Adam(compiled->parameters())`, `replicate_state(compiled)`.
/// Copies share the programs.
template <class M>
class CompiledModule {
  static constexpr bool kIsModule = std::derived_from<M, torch::nn::Module>;

 public:
  CompiledModule(M& module, CompileOptions options)
      : module_(held(module)),
        forward_(
            std::make_shared<detail::CompiledForward>(nn::as_module(module), std::move(options))) {}

  template <class... A>
  auto operator()(A&&... arguments) {
    return forward(std::forward<A>(arguments)...);
  }
  template <class... A>
  auto forward(A&&... arguments) {
    using R = std::remove_cvref_t<decltype((*module_).forward(std::forward<A>(arguments)...))>;
    std::optional<R> result;
    forward_->run([&] { result.emplace((*module_).forward(std::forward<A>(arguments)...)); });
    return std::move(*result);
  }

  /// The module that was compiled.
  M& original() {
    if constexpr (kIsModule)
      return *module_;
    else
      return module_;
  }
  auto& operator*() const { return *module_; }
  auto* operator->() const { return &*module_; }
  explicit operator bool() const { return true; }

  std::string explain(const ExplainOptions& options = {}) const {
    return forward_->explain(options);
  }
  std::string generated_code() const { return forward_->generated_code(); }
  std::string program_graph() const { return forward_->program_graph(); }

 private:
  static auto held(M& module) {
    if constexpr (kIsModule)
      return &module;
    else
      return module;
  }

  mutable std::conditional_t<kIsModule, M*, M> module_;  // a holder is as good as a pointer
  std::shared_ptr<detail::CompiledForward> forward_;
};

}  // namespace tessera
