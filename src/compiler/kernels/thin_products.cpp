#include "compiler/kernels/thin_products.h"

#include "compiler/kernels/thin_table.h"

#include <ATen/Parallel.h>

#include <optional>
#include <vector>

namespace tessera::compiler {
namespace {

std::optional<ThinTable> table_of_machine() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return thin_table_avx512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return thin_table_avx2();
#endif
  return std::nullopt;
}

bool lies_row_by_row(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) == matrix.size(1);
}

bool is_plain(const at::Tensor& matrix) {
  return matrix.dim() == 2 && matrix.scalar_type() == at::kFloat && matrix.is_cpu() &&
         !matrix.is_neg();
}

/// Calls `run(begin, end)` for parts of `count`, each of which has work for a thread.
template <class Run>
void in_parallel(int64_t count, int64_t work_of_one, const Run& run) {
  constexpr int64_t kLeast = int64_t{1} << 16;
  at::parallel_for(0, count, std::max<int64_t>(kLeast / work_of_one, 1), run);
}

/// [inner, padded], zero behind the last sample.
std::vector<float> transposed(const at::Tensor& samples, int64_t padded) {
  const int64_t count = samples.size(0), inner = samples.size(1);
  std::vector<float> to(static_cast<size_t>(inner * padded));
  const auto* from = samples.const_data_ptr<float>();
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t k = 0; k < inner; ++k)
      to[static_cast<size_t>(k * padded + t)] = from[t * inner + k];
  }
  return to;
}

}  // namespace

bool multiply_thin(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                   const at::Tensor& bias) {
  static const auto table = table_of_machine();
  if (!table || !is_plain(left) || !is_plain(right) || out.numel() == 0) return false;
  const int64_t rows = left.size(0), inner = left.size(1), columns = right.size(1);
  const auto is_few = [&](int64_t samples) { return samples > 1 && samples <= table->most; };
  const auto* a = left.const_data_ptr<float>();
  const auto* b = right.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  if (is_few(rows) && lies_row_by_row(left) && lies_row_by_row(right.t())) {
    if (bias.defined() &&
        (bias.scalar_type() != at::kFloat || bias.sizes() != at::IntArrayRef(columns)))
      return false;
    const int64_t padded = (rows + table->lanes - 1) / table->lanes * table->lanes;
    const auto samples = transposed(left, padded);
    const ThinForward of{.matrix = b,
                         .samples = samples.data(),
                         .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                         .bias_step = bias.defined() ? bias.stride(0) : 0,
                         .out = to,
                         .rows = columns,
                         .inner = inner,
                         .count = rows,
                         .padded = padded};
    in_parallel(columns, inner,
                [&](int64_t begin, int64_t end) { table->forward(of, begin, end); });
    return true;
  }
  if (bias.defined() || !lies_row_by_row(right)) return false;
  if (is_few(rows) && lies_row_by_row(left) && inner > 0) {
    const ThinBackward of{b, a, to, inner, columns, rows};
    in_parallel(columns, inner,
                [&](int64_t begin, int64_t end) { table->backward(of, begin, end); });
    return true;
  }
  if (!is_few(inner)) return false;
  const ThinOuter of{a, left.stride(0), left.stride(1), b, to, columns, inner};
  in_parallel(rows, columns, [&](int64_t begin, int64_t end) { table->outer(of, begin, end); });
  return true;
}

}  // namespace tessera::compiler
