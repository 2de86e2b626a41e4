#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// op.callBoxed(stack), also of operators that return several out= arguments. libtorch's own way
/// returns references to what it has dropped from the stack by then.
void call_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace tessera
