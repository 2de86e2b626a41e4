#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

/// Parameters whose rows were put into another order when they were distributed. That can't be told
/// from the tensor, and whoever hands in whole values has to know.
namespace tessera::dtensor {

/// Of how many parts each of so many ranks has its share, one after the other.
struct PackedRows {
  int64_t parts = 1;  // 1: rows are in their own order
  int64_t ranks = 1;
};
PackedRows packed_rows(const at::Tensor& parameter);
int64_t packed_parts(const at::Tensor& parameter);
void remember_packed(const at::Tensor& parameter, PackedRows packed);

}  // namespace tessera::dtensor
