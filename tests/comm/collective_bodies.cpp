#include "comm/collective_bodies.h"

#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>

namespace tessera::collective_bodies {

using c10d::ReduceOp;

const std::vector<at::ScalarType> kDtypes = {
    at::kDouble, at::kFloat,  at::kHalf,         at::kBFloat16, at::kChar,
    at::kShort,  at::kInt,    at::kLong,         at::kByte,     at::kUInt16,
    at::kUInt32, at::kUInt64, at::kComplexFloat, at::kBool,     at::kComplexDouble};

const std::vector<ReduceOp::RedOpType> kOps = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                                               ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
                                               ReduceOp::BOR, ReduceOp::BXOR};

bool has_meaning(at::ScalarType dtype, ReduceOp::RedOpType op) {
  const bool is_bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  const bool is_order = op == ReduceOp::MIN || op == ReduceOp::MAX;
  if (at::isComplexType(dtype)) return !is_bitwise && !is_order;
  return at::isFloatingType(dtype) ? !is_bitwise : op != ReduceOp::AVG;
}

at::Tensor sample(const Setting& setting, int peer, at::IntArrayRef sizes, at::ScalarType dtype,
                  int salt) {
  const int holder = setting.is_fake() ? rank() : peer;
  auto generator = at::detail::createCPUGenerator(1000 * (holder + 1) + salt);
  if (at::isComplexType(dtype)) {
    return at::complex(at::randn(sizes, generator, at::kDouble),
                       at::randn(sizes, generator, at::kDouble))
        .to(dtype);
  }
  if (at::isFloatingType(dtype)) return at::randn(sizes, generator, at::kDouble).to(dtype);
  if (dtype == at::kBool) return at::randint(2, sizes, generator, at::kLong).to(dtype);
  const int64_t lowest = at::isSignedType(dtype) ? -5 : 0;
  return at::randint(lowest, lowest + 12, sizes, generator, at::kLong).to(dtype);
}

Tensors samples(const Setting& setting, at::IntArrayRef sizes, at::ScalarType dtype, int salt) {
  Tensors all;
  for (int peer = 0; peer < setting.ranks; ++peer)
    all.push_back(sample(setting, peer, sizes, dtype, salt));
  return all;
}

at::Tensor pattern(int peer, int64_t count, at::ScalarType dtype) {
  return pattern_from(peer, 0, count, dtype);
}

at::Tensor pattern_from(int peer, int64_t begin, int64_t count, at::ScalarType dtype) {
  return (at::arange(begin, begin + count, at::kLong) * 31 + 17 * peer).remainder(251).to(dtype);
}

namespace {

at::Tensor combine(const at::Tensor& left, const at::Tensor& right, ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::PRODUCT:
      return left * right;
    case ReduceOp::MIN:
      return at::minimum(left, right);
    case ReduceOp::MAX:
      return at::maximum(left, right);
    case ReduceOp::BAND:
      return at::bitwise_and(left, right);
    case ReduceOp::BOR:
      return at::bitwise_or(left, right);
    case ReduceOp::BXOR:
      return at::bitwise_xor(left, right);
    default:
      return left + right;
  }
}

/// The type the plain computation is done in.
at::ScalarType wide(at::ScalarType dtype) {
  if (dtype == at::kHalf || dtype == at::kBFloat16) return at::kFloat;
  return at::isIntegralType(dtype, /*includeBool=*/true) ? at::kLong : dtype;
}

}  // namespace

at::Tensor reduced(const Setting& setting, const Tensors& inputs, ReduceOp::RedOpType op) {
  if (setting.is_fake()) return inputs[0];
  const auto dtype = inputs[0].scalar_type();
  auto result = inputs[0].to(wide(dtype));
  for (size_t i = 1; i < inputs.size(); ++i)
    result = combine(result, inputs[i].to(result.scalar_type()), op);
  if (op == ReduceOp::AVG) result = result / static_cast<double>(inputs.size());
  return result.to(dtype);
}

void expect_reduced(const Setting& setting, const at::Tensor& actual, const at::Tensor& expected,
                    const std::string& label) {
  // Products of complex numbers are rounded in whatever order the compiler chose.
  if (setting.is_ordered() && !expected.is_complex()) {
    testing::expect_bitwise_equal(actual, expected, label);
  } else {
    testing::expect_equal(actual, expected, label);
  }
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto plain = tensor.detach().contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

void expect_same_bits_on_all_ranks(const at::Tensor& tensor, const std::string& label) {
  const auto own = bytes_of(tensor);
  const auto all = gather_bytes(own);
  for (size_t peer = 0; peer < all.size(); ++peer) {
    EXPECT_TRUE(all[peer] == own) << label << ": rank " << rank() << " and rank " << peer
                                  << " have different bits";
  }
}

c10::intrusive_ptr<c10d::Backend> backend() { return default_group()->getBackend(at::kCPU); }

}  // namespace tessera::collective_bodies
