#pragma once

#include "dtensor/path.h"
#include "dtensor/plan.h"

#include <optional>
#include <vector>

namespace tessera::dtensor {

/// One assignment of placements to everything a call touches.
struct Candidate {
  std::vector<Placements> outputs;  // by return
  std::vector<Placements> inputs;   // by tensor argument
  bool even = false;                // only if all shards are equally large
};

/// The candidate to which the inputs are brought most cheaply, of all combinations of the rule's
/// rows over the mesh dimensions; none if nothing fits. `fixed`: by input, those that must be
/// placed as they are. `shapes`: of the results, empty if they are not known.
std::optional<Candidate> choose(const Call& call, const Rule& rule, const Spec& mesh,
                                const ResultShapes& shapes, const std::vector<bool>& fixed);

inline Layout layout_of(const Operand& operand, const Spec& mesh) {
  return {operand.sizes, static_cast<int64_t>(c10::elementSize(operand.dtype)), mesh.mesh_shape};
}

/// The argument whose tensor a return is, if the operator writes it.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t output);

}  // namespace tessera::dtensor
