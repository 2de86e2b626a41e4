#pragma once

#include <tessera/compile/backward.h>
#include <tessera/compile/compiler.h>
#include <tessera/compile/config.h>
#include <tessera/compile/explain.h>
#include <tessera/compile/graph.h>
#include <tessera/compile/last_train_step.h>
#include <tessera/compile/layout.h>
#include <tessera/compile/module.h>
#include <tessera/compile/options.h>
#include <tessera/compile/pass.h>
#include <tessera/detail/compile/step.h>

#include <memory>
#include <utility>

/// Turns a train step into one program: forward, backward, communication and optimizer as a list of
/// operators that is made better as a whole and run without the code that issued them.
namespace tessera {

/// A function whose calls run a program, once there is one. Copies share it.
template <class F>
class Compiled {
 public:
  Compiled(F function, CompileOptions options)
      : function_(std::make_shared<F>(std::move(function))),
        step_(std::make_shared<detail::Step>(std::move(options),
                                             detail::bytes_of_function(*function_))) {}

  template <class... A>
    requires(!(detail::kIsLastTrainStep<A> || ...) && std::invocable<F&, A...>)
  std::invoke_result_t<F&, A...> operator()(A&&... arguments) const {
    return run<std::invoke_result_t<F&, A...>>(/*leaves_work=*/false, arguments...);
  }

  template <class... A>
    requires(detail::kIsLastTrainStep<A> || ...)
  decltype(auto) operator()(A&&... arguments) const {
    const bool is_last = (detail::is_last(arguments) && ...);
    return std::apply(
        [&]<class... G>(G&&... given) {
          return run<std::invoke_result_t<F&, G...>>(!is_last, given...);
        },
        std::tuple_cat(detail::handed_on(std::forward<A>(arguments))...));
  }

  /// What was captured, what was not and why, and why it was captured again.
  std::string explain(const ExplainOptions& options = {}) const { return step_->explain(options); }
  std::string generated_code() const { return step_->generated_code(); }
  std::string program_graph() const { return step_->program_graph(); }
  const detail::Step& step() const { return *step_; }

 private:
  template <class R, class... A>
  R run(bool leaves_work, A&... arguments) const {
    detail::check_takes<F, A...>();
    detail::StepArguments given;
    given.leaves_work = leaves_work;
    (detail::add_argument(given, arguments), ...);
    if constexpr (std::is_void_v<R>) {
      std::shared_ptr<const void> none;
      const auto body = [&]() -> std::vector<at::Tensor> {
        (*function_)(arguments...);
        return {};
      };
      step_->call(given, body, none);
    } else {
      return call<std::remove_cvref_t<R>>(given, arguments...);
    }
  }

  template <class R, class... A>
  R call(const detail::StepArguments& given, A&... arguments) const {
    detail::check_result<R>();
    std::optional<R> returned;
    std::shared_ptr<const void> form;
    const auto tensors = step_->call(
        given,
        [&] {
          returned = (*function_)(arguments...);
          std::vector<at::Tensor> results;
          // Taken out: what holds one, or its history, would pass for a user's.
          nn::visit_tensors(
              *returned, [&](at::Tensor& tensor) { results.push_back(std::exchange(tensor, {})); });
          form = std::make_shared<R>(*returned);
          return results;
        },
        form);
    R result = returned ? std::move(*returned) : *std::static_pointer_cast<const R>(form);
    nn::visit_tensors(
        result, [&, next = size_t{0}](at::Tensor& tensor) mutable { tensor = tensors.at(next++); });
    return result;
  }

  std::shared_ptr<F> function_;  // stays where it is: its bytes are watched
  std::shared_ptr<detail::Step> step_;
};

/// The function, compiled. Its first two calls (three if the first makes an optimizer's state) run
/// eagerly and are recorded; then its program runs while what it depends on is the same. Compared:
/// - of arguments: sizes, strides, dtypes, devices, requires_grad, shared memory and placements of
///   tensors; numbers, strings, flags; which modules and optimizers they are;
/// - grad mode, autocast, the default dtype; hooks and requires_grad of parameters, which gradients
///   and optimizer state exist, hyperparameters, whether gradients are averaged;
/// - every module that is called and can be hooked (TESSERA_MODULE, tessera::nn), given or named
///   (CompileOptions::module), and all below one of these: training mode, hooks, and its members by
///   their bytes: numbers, flags, options, which tensor a member is; of a std::vector or
///   std::string address and size alone. Members of a user's class that can't be hooked are not
///   seen;
/// - what the function object holds by value, by its bytes; std::ref(functor) watches the functor;
/// - variables in CompileOptions::watch.
/// Bytes that the function itself changes while it is recorded, such as a counter, are not
/// compared; explain() names them. A learning rate of tessera::optim may change freely; pass a
/// number that changes often as a 0-dim tensor. A change is recorded anew, into a program of its
/// own (see CompileOptions::max_programs).
///
/// Nothing else is compared, such as what a lambda captures by reference. So at calls 8, 16, … 256
/// of a program, and then so rarely that it costs less than 1 %, the function runs eagerly and is
/// recorded again, but in parallel modes. If it does something else by then, a warning names the
/// operator and argument that changed, and a new program is made (fullgraph: an error).
///
/// What the function does besides tensor work, such as printing or counting, happens only in calls
/// that are recorded. A tensor of the step that somebody still holds after it (a list of losses)
/// makes it run eagerly, with a warning. Tensors it returns have no history. All else is written as
/// the function would have written it: parameters, gradients, buffers, optimizer state. A call that
/// throws because a peer is lost may have written a part of that; the error says so.
///
/// For the whole process: the first recording takes the dispatch key PrivateUse2 and wraps
/// libtorch's CPU allocator, and on a CPU glibc is told to keep freed memory, unless
/// InitOptions::keep_freed_memory is false.
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

}  // namespace tessera
