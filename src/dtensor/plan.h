#pragma once

#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::dtensor {

/// Global sizes and strides of one result.
struct ResultShape {
  Sizes sizes;
  Sizes strides;
  c10::ScalarType dtype;
};

/// What an operator would return for the whole tensors; empty if only running it can tell.
/// By return, then by element of a list.
using ResultShapes = std::vector<std::vector<ResultShape>>;
struct Inference {
  ResultShapes shapes;
  /// The whole tensors do not seem to fit together. Parts of them might all the same: the operator
  /// must see the whole, and say what is wrong on every rank alike.
  bool is_doubtful = false;
};
Inference infer_shapes(const c10::OperatorHandle& op, const Call& call, const Rule* rule);

/// How a call runs on parts, worked out once for all calls that look the same.
struct CallPlan {
  /// An input that has to be placed otherwise first.
  struct Move {
    size_t argument;
    size_t position;  // in the list
    SpecPtr to;
    RedistributePath path;
  };
  struct Output {
    SpecPtr spec;
    std::vector<ResultShape> shapes;     // empty: taken from the local result
    std::optional<size_t> same_as = {};  // the argument that is returned
    bool is_view = false;
  };

  /// A target that is written where its move brought it, and then brought back.
  struct Return {
    size_t argument;
    SpecPtr from;
    RedistributePath path;
  };

  SpecPtr mesh;
  std::vector<Move> moves;
  std::vector<Return> returns;
  std::vector<Output> outputs;
  std::vector<std::pair<size_t, c10::IValue>> replaced;  // arguments with other local values
  const Rule* rule = nullptr;                            // null: none, all is replicated
  Choice choice;
  std::vector<Sizes> input_sizes;  // global, of the first operand of each input; if rule->run
  std::vector<TensorArgument> destinations;
  std::optional<size_t> generator;  // the argument, if the ranks must draw alike
  /// It draws from the default generator, which can't be given another: all ranks need the same.
  bool draws_by_itself = false;
};

/// Throws if the call can't run: meshes differ, an in-place operation would need its target placed
/// otherwise.
CallPlan make_plan(const c10::OperatorHandle& op, const Call& call);

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
