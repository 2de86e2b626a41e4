#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

namespace tessera::nn::detail {

/// An operator of ATen on the rows of contiguous tensors of a GPU.
struct RowOperator {
  const char* name;                    // "aten::native_layer_norm"
  std::vector<c10::IValue> arguments;  // one per argument of its schema
  struct Result {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;  // contiguous
  };
  std::vector<Result> results;
};

/// What it gives, by kernels that the compiler writes for these sizes; none: ATen's are to be
/// taken. The compiler, which lies above this folder, puts itself here.
using RunRowOperator = std::optional<std::vector<at::Tensor>> (*)(const RowOperator&);
void set_row_kernels(RunRowOperator run);

}  // namespace tessera::nn::detail
