#pragma once

#include <ATen/core/stack.h>

#include <vector>

namespace tessera::compiler {

/// Whether what an operator writes into a tensor of a list is seen, or written, through another
/// tensor of a list at another place: then it matters in which order it goes through them.
/// `is_written`: by argument.
bool overlap_in_lists(const torch::jit::Stack& arguments, const std::vector<bool>& is_written);
/// Whether two of them share memory.
bool overlap(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::compiler
