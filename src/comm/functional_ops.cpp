#include "comm/functional_ops.h"

#include "comm/reduce_op.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::comm::functional {
namespace {

/// Boxed, because the type of the group argument differs between versions of libtorch.
at::Tensor call(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  op.callBoxed(arguments);
  return std::move(arguments.back()).toTensor();
}

std::vector<at::Tensor> call_for_list(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  op.callBoxed(arguments);
  return arguments.back().toTensorVector();
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group) {
  static const auto kOp = find("_c10d_functional::all_reduce");
  return call(kOp, {tensor, name_of_reduce(op), group->getGroupName()});
}

at::Tensor all_gather(const at::Tensor& tensor, const Group& group) {
  static const auto kOp = find("_c10d_functional::all_gather_into_tensor");
  return call(kOp, {tensor, int64_t{group->getSize()}, group->getGroupName()});
}

at::Tensor reduce_scatter(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group) {
  static const auto kOp = find("_c10d_functional::reduce_scatter_tensor");
  return call(kOp, {tensor, name_of_reduce(op), int64_t{group->getSize()}, group->getGroupName()});
}

at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits, const Group& group) {
  static const auto kOp = find("_c10d_functional::all_to_all_single");
  return call(kOp, {tensor, output_splits, input_splits, group->getGroupName()});
}

at::Tensor broadcast(const at::Tensor& tensor, int64_t source, const Group& group) {
  static const auto kOp = find("_c10d_functional::broadcast");
  return call(kOp, {tensor, source, group->getGroupName()});
}

std::vector<at::Tensor> all_reduce(const std::vector<at::Tensor>& tensors, ReduceOp::RedOpType op,
                                   const Group& group) {
  static const auto kOp = find("_c10d_functional::all_reduce_coalesced");
  return call_for_list(kOp, {tensors, name_of_reduce(op), group->getGroupName()});
}

std::vector<at::Tensor> all_gather(const std::vector<at::Tensor>& tensors, const Group& group) {
  static const auto kOp = find("_c10d_functional::all_gather_into_tensor_coalesced");
  return call_for_list(kOp, {tensors, int64_t{group->getSize()}, group->getGroupName()});
}

std::vector<at::Tensor> reduce_scatter(const std::vector<at::Tensor>& tensors,
                                       ReduceOp::RedOpType op, const Group& group) {
  static const auto kOp = find("_c10d_functional::reduce_scatter_tensor_coalesced");
  return call_for_list(
      kOp, {tensors, name_of_reduce(op), int64_t{group->getSize()}, group->getGroupName()});
}

std::vector<at::Tensor> wait(std::vector<at::Tensor> pending) {
  for (auto& tensor : pending) tensor = wait(tensor);
  return pending;
}

at::Tensor wait(const at::Tensor& pending) {
  static const auto kOp = find("_c10d_functional::wait_tensor");
  return call(kOp, {pending});
}

}  // namespace tessera::comm::functional
