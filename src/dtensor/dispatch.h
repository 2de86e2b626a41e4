#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <span>

namespace tessera::dtensor {

/// The kernel of every operator on distributed tensors: arguments on the stack in, results out.
void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Throws if a plain tensor of several elements meets distributed ones, which says nothing of what
/// the other ranks hold, or one whose gradient would come back distributed.
void check_plain(const c10::FunctionSchema& schema, std::span<const c10::IValue> arguments,
                 size_t index);

}  // namespace tessera::dtensor
