#include "comm/shm/device_medium.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>

namespace tessera::comm::shm {
namespace {

bool is_half(c10::ScalarType dtype) { return dtype == c10::kHalf || dtype == c10::kBFloat16; }

/// libtorch's operators know signed integers better: sums, products and bits are the same.
c10::ScalarType computed_as(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kUInt16:
      return c10::kShort;
    case c10::kUInt32:
      return c10::kInt;
    case c10::kUInt64:
      return c10::kLong;
    default:
      return dtype;
  }
}

/// Of unsigned integers read as signed ones: with the highest bit turned around their order is that
/// of signed ones.
at::Tensor turn_order(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case c10::kShort:
      return tensor.bitwise_xor(std::numeric_limits<int16_t>::min());
    case c10::kInt:
      return tensor.bitwise_xor(std::numeric_limits<int32_t>::min());
    default:
      return tensor.bitwise_xor(std::numeric_limits<int64_t>::min());
  }
}

/// Of truth values a sum or maximum is "any", a product or minimum "all".
Reduction meaning_of(Reduction reduction, c10::ScalarType dtype) {
  if (dtype != c10::kBool) return reduction;
  if (reduction == Reduction::Sum || reduction == Reduction::Max) return Reduction::Or;
  if (reduction == Reduction::Product || reduction == Reduction::Min) return Reduction::And;
  return reduction;
}

void combine_two(Reduction reduction, at::Tensor& out, const at::Tensor& left,
                 const at::Tensor& right) {
  switch (reduction) {
    case Reduction::Sum:
    case Reduction::Avg:
      at::add_out(out, left, right);
      return;
    case Reduction::Product:
      at::mul_out(out, left, right);
      return;
    case Reduction::Min:
      at::minimum_out(out, left, right);
      return;
    case Reduction::Max:
      at::maximum_out(out, left, right);
      return;
    case Reduction::And:
      at::bitwise_and_out(out, left, right);
      return;
    case Reduction::Or:
      at::bitwise_or_out(out, left, right);
      return;
    case Reduction::Xor:
      at::bitwise_xor_out(out, left, right);
      return;
    case Reduction::Count:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "no such reduction");
}

}  // namespace

void combine_on_device(c10::Device device, const Combine& how, void* out,
                       const std::vector<const void*>& operands, size_t bytes) {
  const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
  const auto dtype = computed_as(how.dtype);
  const auto elements = static_cast<int64_t>(bytes / how.element_size);
  const auto view = [&](const void* data) {
    return at::for_blob(const_cast<void*>(data), {elements})
        .target_device(device)
        .options(at::TensorOptions(dtype).device(device))
        .make_tensor();
  };
  const bool is_ordered = how.reduction == Reduction::Min || how.reduction == Reduction::Max;
  const bool turns = dtype != how.dtype && is_ordered;
  const auto load = [&](const void* data) {
    auto operand = view(data);
    if (is_half(dtype)) return operand.to(c10::kFloat);
    return turns ? turn_order(operand) : operand;
  };
  const auto reduction = meaning_of(how.reduction, dtype);
  auto result = view(out);
  // The last sum can go straight to where it belongs; those before must not, since that may be an
  // operand.
  const bool is_direct = !is_half(dtype) && !turns;
  at::Tensor sum = load(operands[0]);
  for (size_t i = 1; i < operands.size(); ++i) {
    const bool is_last = i + 1 == operands.size();
    const auto operand = load(operands[i]);
    at::Tensor next = is_last && is_direct                      ? result
                      : i == 1 && sum.data_ptr() == operands[0] ? at::empty_like(sum)
                                                                : sum;
    combine_two(reduction, next, sum, operand);
    sum = next;
  }
  if (how.reduction == Reduction::Avg) sum.div_(static_cast<int64_t>(operands.size()));
  if (turns) sum = turn_order(sum);
  if (!sum.is_same(result)) result.copy_(sum);
}

}  // namespace tessera::comm::shm
