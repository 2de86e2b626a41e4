#pragma once

#include <tessera/compile/backward.h>
#include <tessera/compile/compiler.h>
#include <tessera/compile/config.h>
#include <tessera/compile/graph.h>
#include <tessera/compile/last_train_step.h>
#include <tessera/compile/module.h>
#include <tessera/compile/options.h>
#include <tessera/compile/pass.h>
#include <tessera/compile/step.h>

#include <utility>

/// Turns a train step into one program: forward, backward, communication and optimizer as a list of
/// operators that is made better as a whole and run without the code that issued them.
namespace tessera {

/// A function whose calls run a program, once there is one. Copies share it.
template <class F>
class Compiled {
 public:
  Compiled(F function, CompileOptions options)
      : function_(std::move(function)), step_(std::make_shared<detail::Step>(std::move(options))) {}

  template <class... A>
    requires(!(detail::kIsLastTrainStep<A> || ...) && std::invocable<F&, A...>)
  std::invoke_result_t<F&, A...> operator()(A&&... arguments) const {
    using R = std::invoke_result_t<F&, A...>;
    static_assert(std::invocable<F&, A&...>,
                  "tessera::compile: expected a function that takes its arguments by value or "
                  "reference, not as T&&: some calls run it more than once");
    detail::StepArguments given;
    (detail::add_argument(given, arguments), ...);
    if constexpr (std::is_void_v<R>) {
      step_->call(given, [&]() -> std::vector<at::Tensor> {
        function_(arguments...);
        return {};
      });
    } else {
      static_assert(detail::kIsTensors<std::remove_cvref_t<R>>,
                    "tessera::compile: the function must return tensors, or vectors, tuples, "
                    "pairs, optionals or maps of tensors: anything else would be what it was when "
                    "the program was made");
      return call<std::remove_cvref_t<R>>(given, arguments...);
    }
  }

  template <class... A>
    requires(detail::kIsLastTrainStep<A> || ...)
  decltype(auto) operator()(A&&... arguments) const {
    return std::apply(*this, std::tuple_cat(detail::handed_on(std::forward<A>(arguments))...));
  }

  /// What was captured, what was not and why, and why it was captured again.
  std::string explain() const { return step_->explain(); }
  const detail::Step& step() const { return *step_; }

 private:
  template <class R, class... A>
  R call(const detail::StepArguments& given, A&... arguments) const {
    std::optional<R> returned;
    const auto [tensors, kind] = step_->call(given, [&] {
      returned = function_(arguments...);
      std::vector<at::Tensor> results;
      // Taken out: what holds one, or its history, would pass for a user's.
      nn::visit_tensors(*returned,
                        [&](at::Tensor& tensor) { results.push_back(std::exchange(tensor, {})); });
      return results;
    });
    if (returned && kind != detail::Step::kNoKind)
      shapes_->keep(kind, std::make_shared<R>(without_tensors(*returned)));
    R result =
        returned ? std::move(*returned) : *std::static_pointer_cast<const R>(shapes_->at(kind));
    nn::visit_tensors(result, [&, next = size_t{0}, &made = tensors](at::Tensor& tensor) mutable {
      tensor = made.at(next++);
    });
    return result;
  }

  template <class R>
  static R without_tensors(R result) {
    nn::visit_tensors(result, [](at::Tensor& tensor) { tensor.reset(); });
    return result;
  }

  mutable F function_;  // its own affair, as if it were called itself
  std::shared_ptr<detail::Step> step_;
  std::shared_ptr<detail::ResultShapes> shapes_ = std::make_shared<detail::ResultShapes>();
};

/// The function, compiled. Its first calls run as they are and are recorded; from then on the
/// program runs instead, as long as what it depends on is the same: sizes, strides, dtypes and
/// devices of tensors, what of them requires grad, texts among the arguments, numbers that steer
/// the function, grad mode, autocast, training mode and hooks of modules, hooks of parameters,
/// whether gradients are averaged, which gradients and which optimizer state exist,
/// hyperparameters. A change is recorded anew (up to eight programs; calls of further kinds run as
/// they are). A learning rate of tessera::optim may change freely, and so may a number among the
/// arguments that is nothing but an operand of operators; where the function compares such a number
/// with anything but 0 and 1, make the comparison outside and pass a bool.
///
/// What the function does besides tensor work, such as printing or counting, happens only in calls
/// that are recorded. Tensors it returns have no history. Parameters, gradients, buffers and
/// optimizer state are written as the function would have written them.
template <class F>
  requires(!nn::ModuleLike<F>)
Compiled<std::decay_t<F>> compile(F&& function, CompileOptions options = {}) {
  return {std::forward<F>(function), std::move(options)};
}

/// The module, with a forward that runs as a program. Autograd's graph is built at each call as
/// without it, hooks run, and any change is seen: of sizes, of training mode, of what forward does;
/// only the operators are run together, at the end. The backward is autograd's; CompiledBackward
/// makes a program of it too. The module must outlive what is returned if it is given by reference.
template <nn::ModuleLike M>
CompiledModule<std::remove_cvref_t<M>> compile(M&& module, CompileOptions options = {}) {
  return {module, std::move(options)};
}

template <class M>
std::string explain(const CompiledModule<M>& compiled) {
  return compiled.explain();
}

template <class M>
std::string generated_code(const CompiledModule<M>& compiled) {
  return compiled.generated_code();
}

/// What was captured, what was not and why, and why it was captured again.
template <class F>
std::string explain(const Compiled<F>& compiled) {
  return compiled.explain();
}

/// The program of the last capture, as C++ source; empty before it exists.
template <class F>
std::string generated_code(const Compiled<F>& compiled) {
  return compiled.step().generated_code();
}

}  // namespace tessera
