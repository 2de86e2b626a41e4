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

std::vector<at::ScalarType> dtypes(const Setting& setting) {
  if (!setting.is_nccl()) return kDtypes;
  auto moved = kDtypes;
  std::erase_if(moved, [&](at::ScalarType dtype) {
    return !supports(setting.backend, setting.device.type(), dtype);
  });
  return moved;
}

bool can_reduce(const Setting& setting, at::ScalarType dtype, ReduceOp::RedOpType op) {
  if (!has_meaning(dtype, op)) return false;
  if (!setting.is_nccl()) return true;
  const bool is_sum = op == ReduceOp::SUM || op == ReduceOp::AVG;
  const bool is_bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  return at::isComplexType(dtype) ? is_sum : !is_bitwise;
}

namespace {

at::Tensor sample_on_cpu(int holder, at::IntArrayRef sizes, at::ScalarType dtype, int salt) {
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

}  // namespace

at::Tensor sample(const Setting& setting, int peer, at::IntArrayRef sizes, at::ScalarType dtype,
                  int salt) {
  const int holder = setting.is_fake() ? rank() : peer;
  return sample_on_cpu(holder, sizes, dtype, salt).to(setting.device);
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

at::Tensor pattern(const Setting& setting, int peer, int64_t count, at::ScalarType dtype) {
  return pattern(peer, count, dtype).to(setting.device);
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

Tensors on_cpu(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.cpu());
  return result;
}

at::Tensor reduced(const Setting& setting, const Tensors& tensors, ReduceOp::RedOpType op) {
  const auto inputs = on_cpu(tensors);
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
    auto tolerance = testing::tolerance_of(expected.scalar_type());
    // NCCL adds half types up in half precision: an error per rank, of the largest partial sum.
    const bool is_half =
        expected.scalar_type() == at::kHalf || expected.scalar_type() == at::kBFloat16;
    if (setting.is_nccl() && is_half) {
      tolerance.atol = tolerance.rtol * 4 * setting.ranks;
      tolerance.rtol *= setting.ranks;
    }
    testing::expect_equal(actual, expected, label, tolerance);
  }
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto plain = tensor.detach().cpu().contiguous();
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

c10::intrusive_ptr<c10d::Backend> backend(const Setting& setting) {
  return default_group()->getBackend(setting.device.type());
}

}  // namespace tessera::collective_bodies
