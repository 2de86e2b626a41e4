#pragma once

#include <cstdint>

/// Products of float32 matrices, one of which is large while the other has the few rows of a small
/// batch: such a product is bound by memory, and general libraries take about twice as long.
/// Matrices lie row by row. Free of libtorch.
namespace tessera::compiler {

/// out[count, rows] = samples[count, inner] * matrix[rows, inner]^T + bias. Rows [begin, end).
struct ThinForward {
  const float* matrix;
  const float* samples;  // transposed, and padded with zeros: [inner, padded]
  const float* bias;     // [rows], or null
  int64_t bias_step;
  float* out;
  int64_t rows, inner, count, padded;
};

/// out[count, columns] = factors[count, rows] * matrix[rows, columns]. Columns [begin, end).
struct ThinBackward {
  const float* matrix;
  const float* factors;
  float* out;
  int64_t rows, columns, count;
};

/// out[rows, columns] = factors[rows, count] * samples[count, columns]. Rows [begin, end).
struct ThinOuter {
  const float* factors;
  int64_t factor_row, factor_step;  // its strides
  const float* samples;
  float* out;
  int64_t columns, count;
};

struct ThinTable {
  int64_t lanes;  // numbers of samples are padded to a multiple of these
  int64_t most;   // samples with which it is the faster way
  void (*forward)(const ThinForward& of, int64_t begin, int64_t end);
  void (*backward)(const ThinBackward& of, int64_t begin, int64_t end);
  void (*outer)(const ThinOuter& of, int64_t begin, int64_t end);
};

ThinTable thin_table_avx2();
ThinTable thin_table_avx512();

}  // namespace tessera::compiler
