#pragma once

#include "compiler/kernels/loop_nest.h"

#include <vector>

namespace tessera::compiler {

// Note [rows]
// A kernel with reductions goes over the rows of one shape: its last dimension is the row. A value
// in it has an element for each of that shape, or one for each row (what a reduction gives, and
// what is made of that: last dimension 1), or is a sum over rows (tessera::column_sums).
//
//   mean = aten::mean.dim(x, [-1], True)       phase 0: sum of x
//   centred = aten::sub.Tensor(x, mean)        phase 1: sum of squares of x - mean
//   variance = aten::mean.dim(centred * centred, [-1], True)
//   y = centred * aten::rsqrt(variance + eps)  phase 2: y
//
// Each reduction ends a phase: one pass over the row, which a GPU has in registers by then and a
// host in its first cache. So what is loaded is kept, and what is computed from it is computed
// again in the phases that need it.

/// Sums over rows, added up part by part: "column_sums(Tensor self, int parts) -> Tensor", of
/// [..., columns] to [parts, columns], in float for 16 bits.
constexpr const char* kColumnSums = "tessera::column_sums";
/// Columns that a kernel adds up at most.
constexpr int64_t kMostColumnSums = 16384;
/// Adds up the parts of each: "sum_parts(Tensor[] parts) -> Tensor[]", of [parts, columns] to
/// [columns] each; one kernel for all.
constexpr const char* kSumParts = "tessera::sum_parts";
/// "casts(Tensor[] self, ScalarType dtype) -> Tensor[]": one kernel for all.
constexpr const char* kCasts = "tessera::casts";
constexpr size_t kMostOfList = 200;  // of one kernel: as many addresses as it may be given
/// Whether an element's column is the row's number: "one_hot(Tensor self, int classes) -> Tensor",
/// of [..., 1] to [..., classes].
constexpr const char* kOneHot = "tessera::one_hot";

/// A reduction of the last dimension, which stays as 1.
struct RowReduction {
  const char* op;
  const char* combine;   // two numbers: a type of the prelude
  const char* identity;  // before the first
  bool is_mean;          // divided by how many there are, in the end
};

/// None if the node is no reduction that kernels hold.
const RowReduction* row_reduction(const Graph& graph, const Node& node);
bool is_column_sums(const Node& node);
bool is_sum_parts(const Node& node);
/// Whether its kernel, for a list of tensors, is one by itself: sum_parts or casts.
bool is_list_kernel(const Node& node);
bool is_one_hot(const Node& node);
/// Whether it is a reduction of rows or columns.
bool reduces(const Graph& graph, const Node& node);
/// Whether the node makes its kernel one over rows: a reduction, or one_hot, which asks for
/// columns.
bool needs_rows(const Graph& graph, const Node& node);
/// The shape whose rows its kernel goes over.
const std::vector<int64_t>& shape_of_rows(const Graph& graph, const Node& node);

/// GPUs. The host has ATen's, but in the scope of RowsOnHost, by which tests run the plans there.
bool has_row_kernels(c10::Device device);
/// Whether kernels go over the rows of such a tensor: if there are rows enough.
bool is_kernel_row(const ValueType& type);

class RowsOnHost {
 public:
  RowsOnHost();
  ~RowsOnHost();
  RowsOnHost(const RowsOnHost&) = delete;
  RowsOnHost& operator=(const RowsOnHost&) = delete;

 private:
  bool before_;
};

/// `sizes` with 1 for the last one.
std::vector<int64_t> row_shape(std::vector<int64_t> sizes);

/// What a kernel over rows does.
struct RowPlan {
  /// One pass over a row; nodes by position in the body.
  struct Phase {
    std::vector<size_t> of_row;       // pointwise, of values per row: before the pass
    std::vector<size_t> of_elements;  // pointwise
    std::vector<size_t> reductions;   // of rows: their results are there after the pass
    std::vector<size_t> columns;      // column_sums
    std::vector<size_t> reads;        // in RowPlan::reads
    std::vector<size_t> writes;       // in RowPlan::writes

    bool is_pass() const { return !reductions.empty() || !columns.empty() || !writes.empty(); }
  };
  int64_t rows = 0, columns = 0;
  int64_t parts = 0;  // of column_sums; 0: there are none
  std::vector<ValueId> reads = {}, writes = {};
  LoopNest nest = {};                   // over rows, of reads, then writes
  std::vector<int64_t> along_row = {};  // strides, of reads, then writes
  std::vector<Phase> phases = {};
  std::vector<size_t> row_writes = {};  // one number per row, in `writes`

  bool is_element_read(size_t read) const { return along_row[read] != 0; }
};

/// Whether the body is one of a kernel over rows.
bool has_rows(const Graph& body);
RowPlan plan_rows(const Graph& body);

}  // namespace tessera::compiler
