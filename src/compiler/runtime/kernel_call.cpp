// How a program runs kernels: where their outputs lie.
#include "compiler/runtime/program.h"

namespace tessera::compiler {
namespace {

/// Whether nobody else has the tensor, or a view of it, and it is all of its memory.
bool is_sole(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().nbytes() == tensor.nbytes();
}

}  // namespace

Program::KernelCall Program::make_kernel_call(const Node& node, Launch launch,
                                              const std::vector<ValueId>& in_place,
                                              const std::vector<ValueId>& over) {
  KernelCall call{.launch = std::move(launch), .outputs = node.defined()};
  const auto used = node.used();
  for (const size_t input : kernel_inputs(*node.body)) call.inputs.push_back(used.at(input));
  for (const auto value : call.outputs) {
    call.in_place.push_back(in_place[static_cast<size_t>(value)]);
    call.over.push_back(over[static_cast<size_t>(value)]);
  }
  return call;
}

void Program::execute(const KernelCall& call) {
  std::vector<void*> tensors;
  tensors.reserve(call.inputs.size() + call.outputs.size());
  for (const auto value : call.inputs)
    tensors.push_back(const_cast<void*>(at(value).unsafeGetTensorImpl()->data()));
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    auto& output = at(call.outputs[i]);
    if (const auto input = call.in_place[i]; input != kNoValue) {
      shared_.before_write(input);
      output = at(input);
    } else if (const auto over = call.over[i]; over != kNoValue && is_sole(at(over))) {
      output = std::move(at(over));
    } else {
      output = make_value(call.outputs[i]);
    }
    tensors.push_back(output.unsafeGetTensorImpl()->mutable_data());
  }
  call.launch(tensors.data());
}

}  // namespace tessera::compiler
