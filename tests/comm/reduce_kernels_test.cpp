// The kernels that combine elements, for each instruction set, against each other and against plain
// loops.
#include "comm/shm/reduce.h"
#include "support/random.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <random>
#include <vector>

namespace tessera::comm::shm {

namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

size_t size_of(Element element) {
  constexpr size_t kSizes[] = {8, 4, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16};
  return kSizes[static_cast<size_t>(element)];
}
bool is_floating(Element element) { return element <= Element::BFloat16; }
bool is_complex(Element element) {
  return element == Element::Complex64 || element == Element::Complex128;
}

using Buffer = std::vector<uint8_t>;

/// Random bits: all numbers, and so many of the odd ones (NaN, infinity, zero, subnormal) that they
/// meet.
Buffer random_bits(Element element, size_t count, std::mt19937_64& random) {
  Buffer bytes(count * size_of(element));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  if (element == Element::Bool) {
    for (auto& byte : bytes) byte &= 1;
  }
  if (!is_floating(element) && !is_complex(element)) return bytes;
  const size_t part = is_complex(element) ? size_of(element) / 2 : size_of(element);
  for (size_t at = 0; at + part <= bytes.size(); at += part) {
    auto& highest = bytes[at + part - 1];
    auto& second = bytes[at + part - 2];
    switch (random() % 6) {
      case 0:  // infinity or NaN
        highest |= 0x7F;
        second |= 0xF8;
        if (random() % 2 == 0) std::memset(&bytes[at], 0, part - 2);
        break;
      case 1:  // zero or subnormal
        highest &= 0x80;
        second &= 0x03;
        if (random() % 2 == 0) std::memset(&bytes[at], 0, part - 1);
        break;
      case 2:
      case 3:  // moderate, so that sums are rounded and not swallowed
        highest = static_cast<uint8_t>((highest & 0x80) | 0x3F);
        break;
      default:
        break;
    }
  }
  return bytes;
}

Buffer reduce(Reduce kernel, const std::vector<Buffer>& inputs, size_t count) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  Buffer out(inputs[0].size(), 0xEE);
  kernel(out.data(), pointers.data(), static_cast<int>(inputs.size()), count);
  return out;
}

/// Calls check(element, reduction, inputs, count) for every combination that has a meaning.
template <class Check>
void for_every_kernel(Check&& check) {
  std::mt19937_64 random(testing::test_seed());
  for (int e = 0; e < static_cast<int>(Element::Count); ++e) {
    for (int r = 0; r < static_cast<int>(Reduction::Count); ++r) {
      const auto element = static_cast<Element>(e);
      const auto reduction = static_cast<Reduction>(r);
      if (find_reduce_baseline(element, reduction) == nullptr) continue;
      for (const int operands : {1, 2, 3, 7}) {
        for (const size_t count : {size_t{1}, size_t{15}, size_t{64}, size_t{3'001}}) {
          std::vector<Buffer> inputs;
          for (int i = 0; i < operands; ++i) inputs.push_back(random_bits(element, count, random));
          SCOPED_TRACE(::testing::Message() << "element " << e << ", reduction " << r << ", "
                                            << operands << " operands, " << count << " elements");
          check(element, reduction, inputs, count);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(ReduceKernels, ExistForTheSameCombinationsInEveryTable) {
  for (int e = 0; e <= static_cast<int>(Element::Count); ++e) {
    for (int r = 0; r <= static_cast<int>(Reduction::Count); ++r) {
      const auto element = static_cast<Element>(e);
      const auto reduction = static_cast<Reduction>(r);
      EXPECT_EQ(find_reduce_baseline(element, reduction) == nullptr,
                find_reduce_avx2(element, reduction) == nullptr)
          << e << " " << r;
      EXPECT_EQ(find_reduce(element, reduction) == nullptr,
                find_reduce_baseline(element, reduction) == nullptr);
    }
  }
}

/// Whether the number of a floating-point element (or part of a complex one) is a NaN.
bool is_nan(Element element, const uint8_t* bytes) {
  const auto read = [&](auto value) {
    std::memcpy(&value, bytes, sizeof(value));
    return std::isnan(static_cast<double>(value));
  };
  if (element == Element::Float64 || element == Element::Complex128) return read(double{});
  if (element == Element::Float32 || element == Element::Complex64) return read(float{});
  if (element == Element::Float16) return read(c10::Half());
  return element == Element::BFloat16 && read(c10::BFloat16());
}

TEST(ReduceKernels, GiveTheSameBitsWithAndWithoutAvx2) {
  if (!has_avx2()) GTEST_SKIP() << "this processor has no AVX2";
  for_every_kernel([](Element element, Reduction reduction, const auto& inputs, size_t count) {
    const auto plain = reduce(find_reduce_baseline(element, reduction), inputs, count);
    const auto wide = reduce(find_reduce_avx2(element, reduction), inputs, count);
    const size_t size = is_complex(element) ? size_of(element) / 2 : size_of(element);
    for (size_t at = 0; at < plain.size(); at += size) {
      // Of two NaNs either may be handed on: the compiler may swap operands of a sum.
      if (is_nan(element, &plain[at]) && is_nan(element, &wide[at])) continue;
      ASSERT_EQ(std::memcmp(&plain[at], &wide[at], size), 0) << "element " << at / size;
    }
  });
}

TEST(ReduceKernels, GiveTheSameBitsWhereverTheResultGoes) {
  for_every_kernel([](Element element, Reduction reduction, const auto& inputs, size_t count) {
    const auto kernel = find_reduce(element, reduction);
    const auto expected = reduce(kernel, inputs, count);
    for (size_t target = 0; target < inputs.size(); ++target) {
      auto copies = inputs;
      std::vector<const void*> pointers;
      for (const auto& copy : copies) pointers.push_back(copy.data());
      kernel(copies[target].data(), pointers.data(), static_cast<int>(pointers.size()), count);
      ASSERT_TRUE(copies[target] == expected) << "into operand " << target;
    }
  });
}

// --- plain loops
template <class T>
T plain(Reduction reduction, T left, T right) {
  switch (reduction) {
    case Reduction::Product:
      return static_cast<T>(static_cast<std::make_unsigned_t<int64_t>>(left) *
                            static_cast<std::make_unsigned_t<int64_t>>(right));
    case Reduction::Min:
      return std::min(left, right);
    case Reduction::Max:
      return std::max(left, right);
    case Reduction::And:
      return static_cast<T>(left & right);
    case Reduction::Or:
      return static_cast<T>(left | right);
    case Reduction::Xor:
      return static_cast<T>(left ^ right);
    default:
      return static_cast<T>(static_cast<uint64_t>(left) + static_cast<uint64_t>(right));
  }
}

template <class T>
T plain_floating(Reduction reduction, T left, T right) {
  switch (reduction) {
    case Reduction::Product:
      return left * right;
    case Reduction::Min:
      return std::isnan(left) || std::isnan(right) ? std::nan("") : right < left ? right : left;
    case Reduction::Max:
      return std::isnan(left) || std::isnan(right) ? std::nan("") : left < right ? right : left;
    default:
      return left + right;
  }
}

template <class T>
void expect_integers(Element element) {
  for_every_kernel([&](Element other, Reduction reduction, const auto& inputs, size_t count) {
    if (other != element) return;
    const auto out = reduce(find_reduce(element, reduction), inputs, count);
    for (size_t i = 0; i < count; ++i) {
      const auto read = [&](const Buffer& from) {
        T value;
        std::memcpy(&value, &from[i * sizeof(T)], sizeof(T));
        return value;
      };
      T expected = read(inputs[0]);
      for (size_t k = 1; k < inputs.size(); ++k)
        expected = plain<T>(reduction, expected, read(inputs[k]));
      ASSERT_EQ(read(out), expected) << "element " << i;
    }
  });
}

/// T: as stored; A: as accumulated.
template <class T, class A>
void expect_floats(Element element) {
  for_every_kernel([&](Element other, Reduction reduction, const auto& inputs, size_t count) {
    if (other != element) return;
    const auto out = reduce(find_reduce(element, reduction), inputs, count);
    for (size_t i = 0; i < count; ++i) {
      const auto read = [&](const Buffer& from) {
        T value;
        std::memcpy(&value, &from[i * sizeof(T)], sizeof(T));
        return value;
      };
      auto total = static_cast<A>(read(inputs[0]));
      for (size_t k = 1; k < inputs.size(); ++k)
        total = plain_floating<A>(reduction, total, static_cast<A>(read(inputs[k])));
      if (reduction == Reduction::Avg) total /= static_cast<A>(inputs.size());
      const T expected = static_cast<T>(total);
      const T actual = read(out);
      if (std::isnan(static_cast<double>(expected))) {
        ASSERT_TRUE(std::isnan(static_cast<double>(actual))) << "element " << i;
      } else {
        ASSERT_EQ(static_cast<double>(actual), static_cast<double>(expected)) << "element " << i;
      }
    }
  });
}

TEST(ReduceKernels, CombineIntegersLikeAPlainLoop) {
  expect_integers<int8_t>(Element::Int8);
  expect_integers<int16_t>(Element::Int16);
  expect_integers<int32_t>(Element::Int32);
  expect_integers<int64_t>(Element::Int64);
  expect_integers<uint8_t>(Element::UInt8);
  expect_integers<uint16_t>(Element::UInt16);
  expect_integers<uint32_t>(Element::UInt32);
  expect_integers<uint64_t>(Element::UInt64);
}

TEST(ReduceKernels, CombineFloatsLikeAPlainLoop) {
  expect_floats<double, double>(Element::Float64);
  expect_floats<float, float>(Element::Float32);
  expect_floats<c10::Half, float>(Element::Float16);
  expect_floats<c10::BFloat16, float>(Element::BFloat16);
}

/// Every half with some others, by each table: covers widening of all of them and rounding of very
/// many floats.
template <class T>
void expect_half_conversions(Element element, Reduce (*table)(Element, Reduction)) {
  constexpr size_t kAll = 65'536;
  std::mt19937_64 random(testing::test_seed());
  std::vector<uint16_t> every(kAll);
  for (size_t i = 0; i < kAll; ++i) every[i] = static_cast<uint16_t>(i);
  for (int turn = 0; turn < 150; ++turn) {
    const std::vector<uint16_t> fixed(kAll,
                                      static_cast<uint16_t>(turn < 16 ? turn << 12 | 1 : random()));
    for (const auto reduction : {Reduction::Sum, Reduction::Product, Reduction::Avg}) {
      std::vector<uint16_t> out(kAll);
      const void* inputs[] = {every.data(), fixed.data()};
      table(element, reduction)(out.data(), inputs, 2, kAll);
      for (size_t i = 0; i < kAll; ++i) {
        const float left = T(every[i], T::from_bits());
        const float right = T(fixed[i], T::from_bits());
        float exact = reduction == Reduction::Product ? left * right : left + right;
        if (reduction == Reduction::Avg) exact /= 2;
        const auto expected = static_cast<T>(exact);
        const T actual(out[i], T::from_bits());
        const bool same =
            std::isnan(exact) ? std::isnan(static_cast<float>(actual)) : actual.x == expected.x;
        ASSERT_TRUE(same) << std::hex << every[i] << " and " << fixed[i] << " gave " << out[i]
                          << " instead of " << expected.x;
      }
    }
  }
}

TEST(ReduceKernels, ConvertEveryHalf) {
  expect_half_conversions<c10::Half>(Element::Float16, find_reduce_baseline);
  if (has_avx2()) expect_half_conversions<c10::Half>(Element::Float16, find_reduce_avx2);
}

TEST(ReduceKernels, ConvertEveryBFloat16) {
  expect_half_conversions<c10::BFloat16>(Element::BFloat16, find_reduce_baseline);
  if (has_avx2()) expect_half_conversions<c10::BFloat16>(Element::BFloat16, find_reduce_avx2);
}

TEST(ReduceKernels, KeepEveryHalfThatIsAlone) {
  for (const auto element : {Element::Float16, Element::BFloat16}) {
    for (auto* table : {find_reduce_baseline, find_reduce_avx2}) {
      if (table == find_reduce_avx2 && !has_avx2()) continue;
      std::vector<uint16_t> every(65'536);
      for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<uint16_t>(i);
      std::vector<uint16_t> out(every.size());
      const void* inputs[] = {every.data()};
      table(element, Reduction::Sum)(out.data(), inputs, 1, every.size());
      const uint16_t quiet = element == Element::Float16 ? 0x0200 : 0x0040;
      const uint16_t infinity = element == Element::Float16 ? 0x7C00 : 0x7F80;
      for (size_t i = 0; i < every.size(); ++i) {
        const bool is_nan = (i & 0x7FFF) > infinity;
        ASSERT_EQ(out[i], is_nan ? every[i] | quiet : every[i]) << std::hex << i;
      }
    }
  }
}

TEST(ReduceKernels, TreatTruthValuesAsAnyAndAll) {
  const std::vector<uint8_t> left{0, 0, 1, 1};
  const std::vector<uint8_t> right{0, 1, 0, 1};
  const auto run = [&](Reduction reduction) {
    return reduce(find_reduce(Element::Bool, reduction), {left, right}, 4);
  };
  EXPECT_EQ(run(Reduction::Sum), (Buffer{0, 1, 1, 1}));
  EXPECT_EQ(run(Reduction::Max), (Buffer{0, 1, 1, 1}));
  EXPECT_EQ(run(Reduction::Or), (Buffer{0, 1, 1, 1}));
  EXPECT_EQ(run(Reduction::Product), (Buffer{0, 0, 0, 1}));
  EXPECT_EQ(run(Reduction::Min), (Buffer{0, 0, 0, 1}));
  EXPECT_EQ(run(Reduction::And), (Buffer{0, 0, 0, 1}));
  EXPECT_EQ(run(Reduction::Xor), (Buffer{0, 1, 1, 0}));
}

}  // namespace
}  // namespace tessera::comm::shm
