#pragma once

#include "dtensor/call.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// What is known of operators, as data. See Note [sharding rules].
namespace tessera::dtensor {

// Note [sharding rules]
// A rule says for ONE mesh dimension how an operator can run on parts: each row gives a placement
// to every return of the schema, then to every tensor argument (one entry for Tensor, Tensor? and
// Tensor[] alike; out= arguments have none), such that running the operator on the parts gives the
// parts of the result. That everything replicated gives a replicated result needs no row. The
// machinery combines rows over the dimensions of a mesh, moves inputs as the cheapest combination
// wants them, and remembers the choice for calls that look the same (see Call for what counts).
// A row must hold for uneven shards unless it says `even`; what a rule can't prove it leaves out.
// In-place and out= forms use the rule of the plain form.

struct Row {
  Row(std::initializer_list<Placement> placements) : placements(placements) {}
  explicit Row(std::vector<Placement> placements, bool even = false)
      : placements(std::move(placements)), even(even) {}

  std::vector<Placement> placements;  // returns, then tensor arguments
  bool even = false;                  // holds only if all its shards are equally large
};
using Rows = std::vector<Row>;

/// A call placed on a whole mesh: what the local half of a rule needs to know.
struct Choice {
  SpecPtr mesh;                     // any spec on the mesh
  std::vector<Placements> outputs;  // by return
  std::vector<Placements> inputs;   // by tensor argument
  std::vector<Sizes> strides = {};  // global, as input_sizes of RunLocal
};

/// Puts local values in place of arguments that speak of the whole (sizes of a view, say).
using Adapt = std::function<void(const Call& call, const Choice& choice, LocalArguments& local)>;
/// Runs in place of the operator, on a stack of local arguments, and leaves local results on it.
using RunLocal =
    std::function<void(const c10::OperatorHandle& op, const Choice& choice,
                       const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack)>;
using Prepare = std::function<void(const c10::FunctionSchema& schema, torch::jit::Stack& local)>;

struct Rule {
  /// `ranks`: of the mesh dimension asked for.
  std::function<Rows(const Call& call, int64_t ranks)> rows;
  /// The operator works on parts that hold nothing.
  bool takes_empty_shards = false;
  /// Rows hold whichever indices a shard consists of, as long as all shards of the row agree: what
  /// strided shards need.
  bool takes_any_indices = false;
  /// Plain tensors among its arguments count as replicated.
  bool takes_plain = false;
  /// What the operator returns depends on whether its first argument is contiguous, and its
  /// derivative asks the whole tensor: the part must be so as well.
  bool reads_layout = false;
  Adapt adapt = {};
  RunLocal run = {};
  /// Tensor arguments that the operator writes though its schema does not say so.
  std::vector<size_t> also_writes = {};
  /// Global sizes of the results, by return; asked if the operator has no Meta kernel.
  /// Empty: the arguments do not fit together.
  std::function<std::vector<Sizes>(const Call& call)> shapes = {};
  /// Gives local arguments the layout in memory that the kernel wants.
  Prepare prepare = {};
};

/// Makes a rule known, for operators by name ("aten::mm": all overloads; "aten::sum.dim_IntList":
/// one). At namespace scope: static const Registration kMm({"aten::mm"}, {...});
class Registration {
 public:
  Registration(std::initializer_list<const char*> operators, Rule rule);
  /// A table that is the same for all calls.
  Registration(std::initializer_list<const char*> operators, Rows rows);
};

/// By operator name. Which one is in force (Scopes::rules) is part of the key under which choices
/// are remembered, so a table lives on.
using RuleTable = std::map<std::string, Rule, std::less<>>;

/// The rule of an operator: a scoped one, its own, that of its plain form, or that of all pointwise
/// operators if it is tagged so; null if there is none.
const Rule* find_rule(const c10::OperatorHandle& op);
/// Names under which rules are registered.
std::vector<std::string> registered_operators();

/// Rule of operators that work element by element, broadcasting. `passes_partial`: sums of parts
/// give the sum (linear in all arguments together).
Rule pointwise_rule(bool passes_partial = false);

}  // namespace tessera::dtensor
