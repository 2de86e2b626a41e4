#include "support/tolerance.h"

#include <ATen/ATen.h>

#include <cstring>
#include <sstream>

namespace tessera::testing {

namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

/// Index in all dimensions of the element at `position` of the flattened tensor, as "[1, 2]".
std::string index_text(at::IntArrayRef sizes, int64_t position) {
  std::vector<int64_t> index(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0;) {
    index[dim] = position % sizes[dim];
    position /= sizes[dim];
  }
  std::ostringstream out;
  out << at::IntArrayRef(index);
  return out.str();
}

std::string element_text(const at::Tensor& flat, int64_t position) {
  std::ostringstream out;
  out.precision(9);
  const at::Scalar value = flat[position].item();
  if (value.isComplex()) {
    out << value.toComplexDouble();
  } else if (value.isFloatingPoint()) {
    out << value.toDouble();
  } else {
    out << value;
  }
  return out.str();
}

AssertionResult comparable(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.defined() != expected.defined()) {
    return AssertionFailure() << "got " << (actual.defined() ? "a" : "an undefined")
                              << " tensor, expected " << (expected.defined() ? "a" : "an undefined")
                              << " one";
  }
  if (!actual.defined()) return AssertionSuccess();
  if (actual.sizes() != expected.sizes()) {
    return AssertionFailure() << "got shape " << actual.sizes() << ", expected "
                              << expected.sizes();
  }
  if (actual.scalar_type() != expected.scalar_type()) {
    return AssertionFailure() << "got dtype " << actual.scalar_type() << ", expected "
                              << expected.scalar_type();
  }
  return AssertionSuccess();
}

/// Flat, on the CPU, in a dtype that has room and arithmetic for everything the original can hold.
at::Tensor widened(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().flatten();
  if (flat.is_complex()) return flat.to(at::kComplexDouble);
  if (flat.is_floating_point()) return flat.to(at::kDouble);
  return flat.to(at::kLong);  // uint64 keeps its bits, and they are compared exactly
}

void describe_largest(AssertionResult& result, const char* kind, const at::Tensor& differences,
                      const at::Tensor& actual, const at::Tensor& expected, at::IntArrayRef sizes) {
  const int64_t position = differences.argmax().item<int64_t>();
  result << "\n  largest " << kind << " difference " << differences[position].item<double>()
         << " at " << index_text(sizes, position) << ": got " << element_text(actual, position)
         << ", expected " << element_text(expected, position);
}

}  // namespace

Tolerance tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kComplexFloat:
      return {.rtol = 1.3e-6, .atol = 1e-5};
    case at::kHalf:
    case at::kComplexHalf:
      return {.rtol = 1e-3, .atol = 1e-5};
    case at::kBFloat16:
      return {.rtol = 1.6e-2, .atol = 1e-5};
    case at::kDouble:
    case at::kComplexDouble:
      return {.rtol = 1e-7, .atol = 1e-7};
    default:
      return {};
  }
}

AssertionResult tensors_equal(const at::Tensor& actual, const at::Tensor& expected,
                              std::optional<Tolerance> tolerance) {
  if (AssertionResult result = comparable(actual, expected); !result || !actual.defined())
    return result;
  const auto [rtol, atol] = tolerance.value_or(tolerance_of(actual.scalar_type()));
  const at::Tensor a = widened(actual);
  const at::Tensor e = widened(expected);
  const at::Tensor difference = (a - e).abs().to(at::kDouble);
  const at::Tensor magnitude = e.abs().to(at::kDouble);
  // a == e also covers infinities, whose difference is NaN.
  const at::Tensor exact = (a == e) | (a.isnan() & e.isnan());
  const at::Tensor close =
      a.scalar_type() == at::kLong && rtol == 0 && atol == 0
          ? exact
          : exact | (difference.isfinite() & (difference <= atol + rtol * magnitude));
  if (close.all().item<bool>()) return AssertionSuccess();

  // A NaN or infinity on one side alone is the largest difference there is.
  const at::Tensor wrong = at::nan_to_num(difference, INFINITY, INFINITY).masked_fill(close, 0);
  AssertionResult result = AssertionFailure();
  result << at::logical_not(close).sum().item<int64_t>() << " of " << a.numel()
         << " elements differ (rtol " << rtol << ", atol " << atol << ")";
  describe_largest(result, "absolute", wrong, a, e, actual.sizes());
  describe_largest(result, "relative", at::nan_to_num(wrong / magnitude, 0.0, INFINITY), a, e,
                   actual.sizes());
  return result;
}

AssertionResult tensors_bitwise_equal(const at::Tensor& actual, const at::Tensor& expected) {
  if (AssertionResult result = comparable(actual, expected); !result || !actual.defined())
    return result;
  const auto flat = [](const at::Tensor& tensor) {
    return tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous().flatten();
  };
  const at::Tensor a = flat(actual);
  const at::Tensor e = flat(expected);
  const auto size = a.element_size();
  const auto* a_bytes = static_cast<const char*>(a.const_data_ptr());
  const auto* e_bytes = static_cast<const char*>(e.const_data_ptr());
  int64_t wrong = 0;
  int64_t first = -1;
  for (int64_t position = 0; position < a.numel(); ++position) {
    if (std::memcmp(a_bytes + position * size, e_bytes + position * size, size) == 0) continue;
    if (first < 0) first = position;
    ++wrong;
  }
  if (wrong == 0) return AssertionSuccess();
  return AssertionFailure() << wrong << " of " << a.numel()
                            << " elements have other bits\n  the first at "
                            << index_text(actual.sizes(), first) << ": got "
                            << element_text(a, first) << ", expected " << element_text(e, first);
}

namespace {

bool report(const AssertionResult& result, const std::string& label,
            const std::source_location& where) {
  if (!result) {
    ADD_FAILURE_AT(where.file_name(), static_cast<int>(where.line()))
        << (label.empty() ? "tensors" : label) << ": " << result.message();
  }
  return static_cast<bool>(result);
}

}  // namespace

bool expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& label,
                  std::optional<Tolerance> tolerance, std::source_location where) {
  return report(tensors_equal(actual, expected, tolerance), label, where);
}

bool expect_bitwise_equal(const at::Tensor& actual, const at::Tensor& expected,
                          const std::string& label, std::source_location where) {
  return report(tensors_bitwise_equal(actual, expected), label, where);
}

}  // namespace tessera::testing
