#pragma once

#include "compiler/ir/memory.h"
#include "compiler/passes/passes.h"
#include "replicate/bucket_assignment.h"

#include <optional>
#include <string>
#include <vector>

/// Reductions of gradients in a graph: division, launch, wait. Passes that bucket or compress them
/// ask here.
namespace tessera::compiler {

struct GradientReduction {
  int launch = 0;               // index of the node
  int wait = 0;                 // of its only user
  std::optional<int> division;  // of the node that divides its input by a number, for this alone
  ValueId source = kNoValue;    // what is divided, or reduced as it is
  std::optional<at::Scalar> divisor = std::nullopt;
  int ready = Uses::kInput;  // index of the node that defines the source
  int needed = 0;            // of the first node that computes with the result
};

/// The launches of this operator that can be moved: waited for once, their inputs left alone.
std::vector<GradientReduction> find_reductions(const Graph& graph, const std::string& op);

using GradientBucket = std::vector<GradientReduction>;

/// When buckets of these caps are closed: as replicate's own.
detail::replicate::BucketFill fill(const BucketCaps& caps);

/// Which of them are sent together, in order: one group, dtype, reduction and divisor each, closed
/// at the cap (that of `caps`, or the node's) or when somebody needs a result before the last one
/// can be sent. A bucket of one without division is left out: nothing is gained, and it hardly is a
/// gradient.
std::vector<GradientBucket> assign_buckets(const Graph& graph,
                                           const std::vector<GradientReduction>& reductions,
                                           const Caps& caps);

/// How many ranks a group has; none if this process does not know it.
std::optional<int64_t> ranks_of(const std::string& group);

/// The index of the node behind which all that a bucket sends exists; Uses::kInput: before the
/// first.
int ready_behind(const GradientBucket& bucket);

}  // namespace tessera::compiler
