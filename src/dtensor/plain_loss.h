#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dtensor {

/// Kernel above autograd, of operators by which a loss and a penalty meet: makes the penalty plain,
/// or calls autograd's own. See Note [losses stay plain].
void keep_loss_plain(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::dtensor
