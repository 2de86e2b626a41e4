#pragma once

// Products with one short side, compiled once per instruction set and free of libtorch. Internal to
// each source that includes it, as comm/shm/reduce_kernels.h is.

#include "compiler/kernels/thin_table.h"

#include <cstddef>

namespace tessera::compiler {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 24;  // of vectors that registers hold beside what they are made of
constexpr int64_t kMost = 32;
#else
constexpr int64_t kLanes = 8;
constexpr int64_t kSums = 10;
constexpr int64_t kMost = 16;
#endif

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
// As it lies in a matrix.
using Unaligned =
    float __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }

/// kRows rows of the large matrix by all samples, whose numbers lie side by side.
template <int64_t kRows, int64_t kVectors>
void multiply_rows(const ThinForward& of, int64_t row) {
  Vector sums[kRows][kVectors] = {};
  const float* matrix = of.matrix + row * of.inner;
  const float* samples = of.samples;
  for (int64_t k = 0; k < of.inner; ++k, samples += kVectors * kLanes) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const Vector sample = load(samples + v * kLanes);
      for (int64_t r = 0; r < kRows; ++r) sums[r][v] += matrix[r * of.inner + k] * sample;
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    const float added = of.bias == nullptr ? 0 : of.bias[(row + r) * of.bias_step];
    for (int64_t t = 0; t < of.count; ++t)
      of.out[t * of.rows + row + r] = sums[r][t / kLanes][t % kLanes] + added;
  }
}

template <int64_t kVectors>
void forward_of(const ThinForward& of, int64_t begin, int64_t end) {
  constexpr int64_t kRows = kSums / kVectors < 8 ? kSums / kVectors : 8;
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) multiply_rows<kRows, kVectors>(of, row);
  for (; row < end; ++row) multiply_rows<1, kVectors>(of, row);
}

void forward(const ThinForward& of, int64_t begin, int64_t end) {
  static_assert(kMost == 2 * kLanes);
  of.padded == kLanes ? forward_of<1>(of, begin, end) : forward_of<2>(of, begin, end);
}

/// Adds what kRows rows of the large matrix contribute to columns [begin, end) of every sample.
template <int64_t kRows, bool kIsFirst>
void add_rows(const ThinBackward& of, int64_t row, int64_t begin, int64_t end) {
  const float* matrix = of.matrix + row * of.columns;
  int64_t k = begin;
  for (; k + kLanes <= end; k += kLanes) {
    Vector parts[kRows];
    for (int64_t r = 0; r < kRows; ++r) parts[r] = load(matrix + r * of.columns + k);
    for (int64_t t = 0; t < of.count; ++t) {
      float* out = of.out + t * of.columns + k;
      Vector sum = kIsFirst ? Vector{} : load(out);
      for (int64_t r = 0; r < kRows; ++r) sum += of.factors[t * of.rows + row + r] * parts[r];
      store(out, sum);
    }
  }
  for (; k < end; ++k) {
    for (int64_t t = 0; t < of.count; ++t) {
      float& out = of.out[t * of.columns + k];
      float sum = kIsFirst ? 0 : out;
      for (int64_t r = 0; r < kRows; ++r)
        sum += of.factors[t * of.rows + row + r] * matrix[r * of.columns + k];
      out = sum;
    }
  }
}

void backward(const ThinBackward& of, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 8;
  int64_t row = 0;
  if (of.rows >= kRows) {
    add_rows<kRows, true>(of, 0, begin, end);
    row = kRows;
  } else {
    add_rows<1, true>(of, 0, begin, end);
    row = 1;
  }
  for (; row + kRows <= of.rows; row += kRows) add_rows<kRows, false>(of, row, begin, end);
  for (; row < of.rows; ++row) add_rows<1, false>(of, row, begin, end);
}

/// kRows rows of the result, in columns [begin, end).
template <int64_t kRows>
void outer_rows(const ThinOuter& of, int64_t row, int64_t begin, int64_t end) {
  const float* factors = of.factors + row * of.factor_row;
  int64_t k = begin;
  for (; k + kLanes <= end; k += kLanes) {
    Vector sums[kRows] = {};
    for (int64_t t = 0; t < of.count; ++t) {
      const Vector sample = load(of.samples + t * of.columns + k);
      for (int64_t r = 0; r < kRows; ++r)
        sums[r] += factors[r * of.factor_row + t * of.factor_step] * sample;
    }
    for (int64_t r = 0; r < kRows; ++r) store(of.out + (row + r) * of.columns + k, sums[r]);
  }
  for (; k < end; ++k) {
    for (int64_t r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int64_t t = 0; t < of.count; ++t)
        sum += factors[r * of.factor_row + t * of.factor_step] * of.samples[t * of.columns + k];
      of.out[(row + r) * of.columns + k] = sum;
    }
  }
}

void outer(const ThinOuter& of, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 8;
  // Of so many columns all samples stay in the first cache.
  const int64_t block = 4096 / of.count / kLanes * kLanes;
  for (int64_t k = 0; k < of.columns; k += block) {
    const int64_t last = k + block < of.columns ? k + block : of.columns;
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) outer_rows<kRows>(of, row, k, last);
    for (; row < end; ++row) outer_rows<1>(of, row, k, last);
  }
}

ThinTable thin_table() {
  return {.lanes = kLanes, .most = kMost, .forward = forward, .backward = backward, .outer = outer};
}

}  // namespace
}  // namespace tessera::compiler
