#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

namespace tessera::nn::detail {

/// An operator on the rows of contiguous tensors of a GPU.
struct RowOperator {
  const char* name;                    // "aten::native_layer_norm"
  std::vector<c10::IValue> arguments;  // one per argument of its schema
  struct Result {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;  // contiguous
  };
  std::vector<Result> results;
};

/// "cross_entropy_rows(Tensor logits, Tensor target, Tensor scale, int ignore_index) -> (Tensor,
/// Tensor)": the loss of each row, [rows, 1], and the gradient of the sum of these, each times
/// `scale`, by the logits.
constexpr const char* kCrossEntropyRows = "tessera::cross_entropy_rows";

/// What it gives, by kernels that the compiler writes for these sizes; none: ATen's are to be
/// taken, also by who records or differentiates a backward, since kernels of ours are no operators.
std::optional<std::vector<at::Tensor>> run_rows(const RowOperator& op);
/// Whether there may be any for it now.
bool has_row_kernels(const at::Tensor& tensor);

/// The compiler, which lies above this folder, puts itself here.
using RunRowOperator = std::optional<std::vector<at::Tensor>> (*)(const RowOperator&);
void set_row_kernels(RunRowOperator run);

}  // namespace tessera::nn::detail
