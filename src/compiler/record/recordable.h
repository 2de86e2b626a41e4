#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

/// What a recorder must know of an operator before it runs; its arguments are the last of `stack`.
namespace tessera::compiler {

/// Throws CannotRecord if what the operator gives depends on values, which the program has not
/// seen.
void check_operator(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Whether it sends a message.
bool sends(const c10::FunctionSchema& schema);

/// What a comparison of whole tensors gives without a look at their values; none if it needs one.
/// libtorch's attention asks so whether it is given one tensor three times.
std::optional<bool> decided_equal(const c10::FunctionSchema& schema,
                                  const torch::jit::Stack& stack);

}  // namespace tessera::compiler
