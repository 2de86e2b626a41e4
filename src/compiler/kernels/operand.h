#pragma once

#include <tessera/compile/graph.h>

#include <c10/core/Scalar.h>

#include <vector>

namespace tessera::compiler {

/// What one element of a pointwise computation gets for one argument of its operator.
struct Operand {
  enum class Kind {
    None,    // absent, or nothing a kernel could read (a memory format, a size)
    Number,  // `number`
    Value,   // an element of `value`
  };
  /// Who decides the dtype of a result: tensors with dimensions, then those without, then numbers.
  enum class Rank { Number, ZeroDim, Tensor };

  Kind kind = Kind::None;
  c10::Scalar number = 0;
  ValueId value = kNoValue;
  at::ScalarType dtype = at::kFloat;
  Rank rank = Rank::Number;
};

/// How many tensors the lists of a node have; 1 for a node without lists.
size_t lanes_of(const Node& node);
/// Argument `index` of `node` as it is for tensor number `lane` of lists.
Operand operand_of(const Graph& graph, const Node& node, size_t index, size_t lane);
/// Result of `node` for tensor number `lane`.
ValueId result_of(const Node& node, size_t lane);

/// The dtype ATen computes a binary operator in.
at::ScalarType promoted(const std::vector<Operand>& operands);

}  // namespace tessera::compiler
