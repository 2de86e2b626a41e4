#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <functional>

namespace tessera::compiler {

/// The arguments of a node as its operator takes them: `tensor_of` gives the tensors (undefined for
/// an absent one).
torch::jit::Stack arguments_of(const Node& node, const c10::FunctionSchema& schema,
                               const std::function<at::Tensor(ValueId)>& tensor_of);

}  // namespace tessera::compiler
