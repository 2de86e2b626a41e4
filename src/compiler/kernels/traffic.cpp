#include "compiler/kernels/traffic.h"

#include "compiler/ir/operators.h"
#include "compiler/kernels/kernel.h"

#include <c10/core/ScalarType.h>

#include <limits>
#include <unordered_set>

namespace tessera::compiler {
namespace {

/// Stays at the largest number there is: a text may claim any sizes and strides.
class Bytes {
 public:
  void add(int64_t number) {
    if (__builtin_add_overflow(sum_, number, &sum_)) sum_ = std::numeric_limits<int64_t>::max();
  }
  void multiply(int64_t factor) {
    if (__builtin_mul_overflow(sum_, factor, &sum_)) sum_ = std::numeric_limits<int64_t>::max();
  }
  int64_t sum() const { return sum_; }

 private:
  int64_t sum_ = 0;
};

int64_t distinct_bytes(const ValueType& type) {
  auto bytes = static_cast<int64_t>(c10::elementSize(type.dtype));
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.strides[i] != 0 || type.sizes[i] == 0) bytes *= type.sizes[i];
  }
  return bytes;
}

}  // namespace

int64_t span_of(const ValueType& type) {
  if (type.numel() == 0) return 0;
  Bytes span;
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    Bytes distance;
    distance.add(type.sizes[i] - 1);
    distance.multiply(type.strides[i]);
    span.add(distance.sum());
  }
  span.add(1);
  span.multiply(static_cast<int64_t>(c10::elementSize(type.dtype)));
  return span.sum();
}

int64_t bytes_moved(const Graph& graph, const Node& node) {
  if (is_view(node)) return 0;
  const auto used = node.used();
  std::unordered_set<ValueId> read(used.begin(), used.end());
  if (node.op == kFused) {
    read.clear();
    for (const size_t input : kernel_inputs(*node.body)) read.insert(used.at(input));
  }
  Bytes bytes;
  for (const ValueId value : read) bytes.add(distinct_bytes(graph.type(value)));
  for (const ValueId value : node.defined()) bytes.add(distinct_bytes(graph.type(value)));
  return bytes.sum();
}

}  // namespace tessera::compiler
