#pragma once

#include <tessera/compile/graph.h>

#include "compiler/record/memory.h"

#include <ATen/core/Tensor.h>

/// Tensors whose values are computed later.
namespace tessera::compiler {

/// A tensor of this type without memory. Whoever asks for its address gets an error.
at::Tensor make_fake(const ValueType& type);

/// Gives memory that has none yet, or other contents, what `value` holds. Shares the value's memory
/// where it can; `value` must be nobody else's.
void give_contents(const LiveMemory& memory, const at::Tensor& value);

}  // namespace tessera::compiler
