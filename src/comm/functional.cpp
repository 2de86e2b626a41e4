// Collectives as functions of tensors, through the dispatcher, differentiable.
#include "comm/functional.h"

#include <tessera/comm.h>

#include "comm/call_check.h"
#include "comm/context.h"
#include "comm/type_names.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

namespace ops = comm::functional;

/// "sizes [2, 3]", what ranks have to agree on beside the number of bytes.
std::string sizes_text(const at::Tensor& tensor) {
  std::string text = "sizes [";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    text.append(dim == 0 ? "" : ", ").append(std::to_string(tensor.size(dim)));
  return text + "]";
}
std::string dim_text(int64_t dim, const at::Tensor& tensor) {
  return "dim " + std::to_string(dim) + " of " + sizes_text(tensor);
}

at::Tensor raw_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op,
                          const Group& group) {
  const comm::CallNote note(sizes_text(tensor));
  return ops::wait(ops::all_reduce(tensor, op, group));
}

/// Ranks' blocks one after another along dim 0 -> joined along `dim`, and back.
at::Tensor raw_all_gather(const at::Tensor& tensor, int64_t dim, const Group& group) {
  const comm::CallNote note(dim_text(dim, tensor));
  const auto blocks = ops::wait(ops::all_gather(tensor.contiguous(), group));
  return dim == 0 ? blocks : at::cat(blocks.chunk(group->getSize(), 0), dim);
}
at::Tensor raw_reduce_scatter(const at::Tensor& tensor, int64_t dim, c10d::ReduceOp::RedOpType op,
                              const Group& group) {
  const comm::CallNote note(dim_text(dim, tensor));
  const auto blocks =
      dim == 0 ? tensor.contiguous() : at::cat(tensor.chunk(group->getSize(), dim), 0);
  return ops::wait(ops::reduce_scatter(blocks, op, group));
}

/// Meta tensors pass: they ask what would come out, and move nothing.
void check_device(const char* caller, const at::Tensor& tensor, const Group& group) {
  const auto device = tensor.device();
  const auto served = group->getDeviceTypes();
  const auto is_it = [&](c10::Device other) { return other.type() == device.type(); };
  if (device.is_meta() || std::any_of(served.begin(), served.end(), is_it)) return;
  std::string places;
  for (const auto& other : served) {
    places += c10::str(places.empty() ? "" : " or ", other.type(), " (",
                       group->getBackend(other.type())->getBackendName(), ")");
  }
  TORCH_CHECK_VALUE(false, caller, ": expected a tensor on ", places, " in group '",
                    group->getGroupName(), "', got one on ", device, "; move it there with .to(), ",
                    "or make the group with a backend for ", device.type(),
                    device.is_cuda() ? " (nccl)" : "");
}

void check_tensor(const char* caller, const at::Tensor& tensor, const Group& group) {
  TORCH_CHECK_VALUE(tensor.defined(), caller, ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, caller,
                    ": expected a dense tensor, got layout ", tensor.layout(),
                    "; call .to_dense() first");
  check_device(caller, tensor, group);
}

int64_t wrap_dim(const char* caller, const at::Tensor& tensor, int64_t dim) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, caller,
                    ": expected a tensor with at least one dimension, got a scalar; ",
                    "unsqueeze it first");
  TORCH_CHECK_VALUE(dim >= -tensor.dim() && dim < tensor.dim(), caller, ": expected a dim from ",
                    -tensor.dim(), " to ", tensor.dim() - 1, ", got ", dim);
  return dim < 0 ? dim + tensor.dim() : dim;
}

struct AllReduce : torch::autograd::Function<AllReduce> {
  static Variable forward(AutogradContext* context, const Variable& tensor, int64_t op,
                          const Group& group) {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
    auto result = raw_all_reduce(tensor, kind, group);
    context->saved_data["op"] = op;
    context->saved_data["group"] = group->getGroupName();
    if (kind == ReduceOp::MIN || kind == ReduceOp::MAX)
      context->save_for_backward({tensor, result});
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto op = static_cast<c10d::ReduceOp::RedOpType>(context->saved_data["op"].toInt());
    const auto group = c10d::resolve_process_group(context->saved_data["group"].toStringRef());
    TORCH_CHECK_NOT_IMPLEMENTED(
        op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::MIN || op == ReduceOp::MAX,
        "all_reduce: ", comm::name_of_reduce(op),
        " is not differentiable; detach the tensor or use sum, avg, min or max");
    if (op == ReduceOp::SUM || op == ReduceOp::AVG)
      return {raw_all_reduce(gradients[0], op, group), {}, {}};
    // The gradient belongs to the ranks that hold the extreme value; those that tie share it.
    const auto saved = context->get_saved_variables();
    const auto holds = (saved[0] == saved[1]).to(gradients[0].scalar_type());
    const auto holders = raw_all_reduce(holds, ReduceOp::SUM, group);
    return {raw_all_reduce(gradients[0], ReduceOp::SUM, group) * holds / holders, {}, {}};
  }
};

struct AllGather : torch::autograd::Function<AllGather> {
  static Variable forward(AutogradContext* context, const Variable& tensor, int64_t dim,
                          const Group& group) {
    context->saved_data["dim"] = dim;
    context->saved_data["group"] = group->getGroupName();
    return raw_all_gather(tensor, dim, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto group = c10d::resolve_process_group(context->saved_data["group"].toStringRef());
    const auto dim = context->saved_data["dim"].toInt();
    return {raw_reduce_scatter(gradients[0], dim, ReduceOp::SUM, group), {}, {}};
  }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static Variable forward(AutogradContext* context, const Variable& tensor, int64_t dim, int64_t op,
                          const Group& group) {
    context->saved_data["dim"] = dim;
    context->saved_data["op"] = op;
    context->saved_data["group"] = group->getGroupName();
    return raw_reduce_scatter(tensor, dim, static_cast<c10d::ReduceOp::RedOpType>(op), group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto op = static_cast<c10d::ReduceOp::RedOpType>(context->saved_data["op"].toInt());
    const auto group = c10d::resolve_process_group(context->saved_data["group"].toStringRef());
    TORCH_CHECK_NOT_IMPLEMENTED(op == ReduceOp::SUM || op == ReduceOp::AVG,
                                "reduce_scatter: ", comm::name_of_reduce(op),
                                " is not differentiable; detach the tensor or use sum or avg");
    auto whole = raw_all_gather(gradients[0], context->saved_data["dim"].toInt(), group);
    return {op == ReduceOp::AVG ? whole / group->getSize() : whole, {}, {}, {}};
  }
};

at::Tensor raw_all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& output_splits,
                          const std::vector<int64_t>& input_splits, const Group& group) {
  return ops::wait(ops::all_to_all(tensor.contiguous(), output_splits, input_splits, group));
}

struct AllToAll : torch::autograd::Function<AllToAll> {
  static Variable forward(AutogradContext* context, const Variable& tensor,
                          std::vector<int64_t> output_splits, std::vector<int64_t> input_splits,
                          const Group& group) {
    context->saved_data["outputs"] = output_splits;
    context->saved_data["inputs"] = input_splits;
    context->saved_data["group"] = group->getGroupName();
    return raw_all_to_all(tensor, output_splits, input_splits, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto group = c10d::resolve_process_group(context->saved_data["group"].toStringRef());
    // What came in goes back where it came from.
    return {raw_all_to_all(gradients[0], context->saved_data["inputs"].toIntVector(),
                           context->saved_data["outputs"].toIntVector(), group),
            {},
            {},
            {}};
  }
};

struct Broadcast : torch::autograd::Function<Broadcast> {
  static Variable forward(AutogradContext* context, const Variable& tensor, int64_t source,
                          const Group& group) {
    context->saved_data["source"] = source;
    context->saved_data["group"] = group->getGroupName();
    const comm::CallNote note(sizes_text(tensor));
    return ops::wait(ops::broadcast(tensor.contiguous(), source, group));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto group = c10d::resolve_process_group(context->saved_data["group"].toStringRef());
    const auto total = raw_all_reduce(gradients[0], ReduceOp::SUM, group);
    // The others' tensors had no part in the result.
    return {
        group->getRank() == context->saved_data["source"].toInt() ? total : at::zeros_like(total),
        {},
        {}};
  }
};

std::vector<int64_t> complete_splits(const char* which, const at::Tensor& tensor,
                                     const std::vector<int64_t>& splits, int64_t ranks) {
  if (!splits.empty()) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(splits.size()) == ranks, "all_to_all: expected ", ranks,
                      " ", which, " splits, one per rank, got ", splits.size());
    return splits;
  }
  TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) % ranks == 0,
                    "all_to_all: expected a first dimension divisible ", "by ", ranks,
                    " ranks, got sizes ", tensor.sizes(), "; pass output_splits and input_splits");
  return std::vector<int64_t>(ranks, tensor.size(0) / ranks);
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, ReduceOp op, const Group& group) {
  const auto used = comm::resolve(group, "all_reduce");
  check_tensor("all_reduce", tensor, used);
  return AllReduce::apply(tensor, static_cast<int64_t>(op.op_), used);
}

at::Tensor all_gather(const at::Tensor& tensor, int64_t dim, const Group& group) {
  const auto used = comm::resolve(group, "all_gather");
  check_tensor("all_gather", tensor, used);
  return AllGather::apply(tensor, wrap_dim("all_gather", tensor, dim), used);
}

at::Tensor reduce_scatter(const at::Tensor& tensor, int64_t dim, ReduceOp op, const Group& group) {
  const auto used = comm::resolve(group, "reduce_scatter");
  check_tensor("reduce_scatter", tensor, used);
  dim = wrap_dim("reduce_scatter", tensor, dim);
  TORCH_CHECK_VALUE(tensor.size(dim) % used->getSize() == 0, "reduce_scatter: expected dimension ",
                    dim, " to be divisible by ", used->getSize(), " ranks, got sizes ",
                    tensor.sizes(), "; pad it first");
  return ReduceScatter::apply(tensor, dim, static_cast<int64_t>(op.op_), used);
}

at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits, const Group& group) {
  const auto used = comm::resolve(group, "all_to_all");
  check_tensor("all_to_all", tensor, used);
  return AllToAll::apply(tensor, complete_splits("output", tensor, output_splits, used->getSize()),
                         complete_splits("input", tensor, input_splits, used->getSize()), used);
}

at::Tensor broadcast(const at::Tensor& tensor, int source, const Group& group) {
  const auto used = comm::resolve(group, "broadcast");
  check_tensor("broadcast", tensor, used);
  TORCH_CHECK_VALUE(source >= 0 && source < used->getSize(),
                    "broadcast: expected a source from 0 to ", used->getSize() - 1, ", got ",
                    source);
  return Broadcast::apply(tensor, int64_t{source}, used);
}

}  // namespace tessera

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
