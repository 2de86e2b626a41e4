// Reductions by gloo where it computes what the other backends do, else by shm's kernels.
#include "comm/gloo/call.h"
#include "comm/shm/tensors.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

namespace tessera::comm::gloo {

using c10d::ReduceOp;

std::optional<Carrier> find_carrier(c10::ScalarType dtype, ReduceOp::RedOpType op) {
  const bool is_sum = op == ReduceOp::SUM || op == ReduceOp::AVG;  // divided afterwards
  const auto gloo_op = is_sum ? ReduceOp::SUM : op;
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
      // Not minimum and maximum: gloo's result depends on which rank holds a NaN.
      return is_sum || op == ReduceOp::PRODUCT ? std::optional(Carrier{dtype, gloo_op})
                                               : std::nullopt;
    case at::kHalf:
    case at::kBFloat16:
      return is_sum || op == ReduceOp::PRODUCT ? std::optional(Carrier{at::kFloat, gloo_op})
                                               : std::nullopt;
    case at::kComplexFloat:
    case at::kComplexDouble:
      return is_sum ? std::optional(Carrier{c10::toRealValueType(dtype), gloo_op}) : std::nullopt;
    case at::kBool:  // 0 or 1: "any" is the maximum, "all" the minimum
      if (op == ReduceOp::SUM || op == ReduceOp::BOR) return Carrier{at::kByte, ReduceOp::MAX};
      if (op == ReduceOp::PRODUCT || op == ReduceOp::BAND) return Carrier{at::kByte, ReduceOp::MIN};
      return Carrier{at::kByte, gloo_op};
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return Carrier{dtype, gloo_op};
    default:
      return std::nullopt;
  }
}

namespace {

bool is_half(c10::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

shm::Combine find_combine(const ArgumentChecks& check, const at::Tensor& tensor,
                          const ReduceOp& op) {
  return shm::find_combine(c10::str("gloo: ", check.name()).c_str(), tensor, op);
}

/// Reduces `inputs`, [ranks, elements] in the order of ranks, into `output`.
void combine(const shm::Combine& how, const at::Tensor& output, const at::Tensor& inputs) {
  std::vector<const void*> pointers;
  const auto* next = static_cast<const uint8_t*>(inputs.const_data_ptr());
  for (int64_t rank = 0; rank < inputs.size(0); ++rank, next += output.nbytes())
    pointers.push_back(next);
  how.kernel(output.data_ptr(), pointers.data(), static_cast<int>(pointers.size()), output.numel());
}

}  // namespace

void GlooBackend::Call::add_all_reduce(const at::Tensor& tensor, const ReduceOp& op) {
  add_all_reduce_of(update(tensor), op);
}

void GlooBackend::Call::add_all_reduce_of(const at::Tensor& memory, const ReduceOp& op) {
  const auto dtype = memory.scalar_type();
  const int size = backend_.getSize();
  const auto carrier = find_carrier(dtype, op.op_);
  if (!carrier || is_carried()) {
    const auto gathered = at::empty({size, memory.numel()}, memory.options());
    add_allgather_bytes(gathered, memory);
    const auto how = find_combine(check_, memory, op);
    return afterwards([=] { combine(how, memory, gathered); });
  }
  const auto carried =
      is_half(dtype) ? memory.to(carrier->dtype) : memory_as(memory, carrier->dtype);
  c10d::AllreduceOptions opts{.reduceOp = carrier->op, .timeout = timeout_};
  Tensors tensors{carried};
  start([tensors, opts](auto& gloo) mutable { return gloo.allreduce(tensors, opts); });
  if (op.op_ == ReduceOp::AVG) afterwards([=] { carried.div_(size); });
  if (is_half(dtype)) afterwards([=] { memory.copy_(carried); });
}

void GlooBackend::Call::add_all_reduce(const Tensors& tensors, const ReduceOp& op) {
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(read(tensor).view({-1}));
  const auto whole = at::cat(flat);
  add_all_reduce_of(whole, op);
  outputs = tensors;
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    copies_.emplace_back(tensor, whole.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

void GlooBackend::Call::check_reduction(const at::Tensor& tensor, const ReduceOp& op) const {
  find_combine(check_, tensor, op);
}

void GlooBackend::Call::add_reduce(const at::Tensor& tensor, const ReduceOp& op, int64_t root) {
  const auto dtype = tensor.scalar_type();
  const int size = backend_.getSize();
  const bool is_root = backend_.getRank() == root;
  const auto memory = is_root ? update(tensor) : read(tensor);
  const auto carrier = find_carrier(dtype, op.op_);
  if (!carrier || is_carried()) {
    std::vector<int64_t> sent(size, 0);
    sent[root] = static_cast<int64_t>(tensor.nbytes());
    const std::vector<int64_t> received(size, is_root ? sent[root] : 0);
    const auto gathered = at::empty({is_root ? size : 0, tensor.numel()}, memory.options());
    add_alltoall_bytes(gathered, received, memory, sent);
    const auto how = find_combine(check_, tensor, op);
    if (is_root) afterwards([=] { combine(how, memory, gathered); });
    return;
  }
  auto carried = is_half(dtype) ? memory.to(carrier->dtype) : memory_as(memory, carrier->dtype);
  if (!is_root && !is_half(dtype))
    carried = carried.clone();  // gloo scribbles on every rank's tensor
  c10d::ReduceOptions opts{.reduceOp = carrier->op, .rootRank = root, .timeout = timeout_};
  Tensors tensors{carried};
  start([tensors, opts](auto& gloo) mutable { return gloo.reduce(tensors, opts); });
  if (!is_root) return;
  if (op.op_ == ReduceOp::AVG) afterwards([=] { carried.div_(size); });
  if (is_half(dtype)) afterwards([=] { memory.copy_(carried); });
}

void GlooBackend::Call::add_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                           const ReduceOp& op) {
  const auto how = find_combine(check_, output, op);
  const auto memory = write(output);
  const auto gathered = at::empty({backend_.getSize(), output.numel()}, memory.options());
  add_alltoall_bytes(gathered, {}, input,
                     {});  // half the bytes of c10d's, which all-reduces and slices
  afterwards([=] { combine(how, memory, gathered); });
}

}  // namespace tessera::comm::gloo
