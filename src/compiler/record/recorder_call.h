#pragma once

#include "compiler/record/recorder.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <vector>

namespace tessera::compiler {

/// One operator on its way: what it was called with, before it ran.
struct Recorder::Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  torch::jit::Stack& stack;
  size_t base;
  torch::jit::Stack given;  // the arguments, held: the stack has the results once it ran
  Node node;
  std::vector<bool> is_fresh;    // by argument: written, and made for it
  std::vector<bool> is_written;  // by argument
};

/// Every tensor that an argument or a result is, or that is in its list.
template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  }
}

inline void check_layout(const c10::FunctionSchema& schema, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided)
    throw CannotRecord(c10::str(schema.name(), " works on a tensor of layout ", tensor.layout()));
  // Kernels see memory alone.
  if (tensor.is_neg() || tensor._is_zerotensor())
    throw CannotRecord(schema.name() +
                       " works on a tensor whose memory is not what it shows: the "
                       "imaginary part of a conjugate, or a zero without memory");
}

}  // namespace tessera::compiler

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

/// Whether what an operator writes into a tensor of a list is seen, or written, through another
/// tensor of a list at another place: then it matters in which order it goes through them.
/// `is_written`: by argument.
bool overlap_in_lists(const torch::jit::Stack& arguments, const std::vector<bool>& is_written);
/// Whether two of them share memory.
bool overlap(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::compiler
