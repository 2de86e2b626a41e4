#pragma once

#include <tessera/compile/graph.h>
#include <tessera/compile/pass.h>

#include <optional>
#include <string>
#include <vector>

/// The passes: each computes the same with less, or sooner.
namespace tessera::compiler {

void remove_dead_code(Graph& graph);      // what no output needs
void merge_equal(Graph& graph);           // the same of the same, once: also collectives and waits
void drop_recompute_marks(Graph& graph);  // marks that kept merge_equal from undoing recomputation
void skip_overwritten(Graph& graph);      // copies into what is overwritten as a whole
void fold_constants(Graph& graph);        // views, copies and arithmetic that change nothing
void sink_expands(Graph& graph);    // pointwise operators before they are expanded, for decompose
void replace_random(Graph& graph);  // dropout draws in kernels, from a seed
void decompose(Graph& graph);       // norms, softmax, losses: for kernels over rows
void join_casts(Graph& graph);      // of parameters, to 16 bits: one kernel for all
void recompute(Graph& graph);       // values that kernels can make again, in place of keeping them
void compress(Graph& graph, at::ScalarType dtype);  // averages gradients in a 16-bit type

// Few large collectives in place of many small ones; the number of buckets of all-reduces becomes
// counters()["ddp_buckets"]. Without caps, those of the nodes count, or the default.
using Caps = std::optional<BucketCaps>;
void bucket_all_reduces(Graph& graph, const Caps& caps);            // as lists of tensors
void bucket_all_reduces_by_concat(Graph& graph, const Caps& caps);  // as one tensor
void bucket_all_reduces_by_size(Graph& graph, const Caps& caps);    // small ones as one
void bucket_reduce_scatters(Graph& graph, const Caps& caps);
void bucket_all_gathers(Graph& graph, const Caps& caps);

// Those of the first whole-step compilers, under their names.
void comm_fusion_with_concat(Graph& graph, const Caps& caps);  // launch_early, then by concat
void remove_copy_from_optimizer(Graph& graph);                 // copies that nobody reads
void split_fused_optimizer(Graph& graph);                      // a part for each bucket
void iter_move_grads_and_optimizers(Graph& graph);  // the last bucket, behind next_iteration

void update_early(Graph& graph);    // large weights right behind their gradients
void launch_early(Graph& graph);    // collectives right behind what they need
void schedule_waits(Graph& graph);  // waits just before somebody needs the result
void reuse_memory(Graph& graph);    // operators write over what nobody needs any more

struct RunOptions {
  std::vector<std::string> disabled = {};  // names of passes to skip; upstream's names too
  /// Gets one file per pass, "00-captured.txt", "01-remove_dead_code.txt" ...; none if empty.
  std::string dump_folder = {};
};

/// Runs the passes in order and verifies the graph after each. Throws a ValueError that names the
/// pass if it left a graph that is not well-formed, or with other inputs or outputs; what
/// a pass itself throws goes on as a c10::Error with its name in front. counters()["passes"]
/// becomes the number of those that ran.
void run_passes(Graph& graph, const std::vector<Pass>& passes, const RunOptions& options = {});

/// The pass of this name, ours or upstream's (`fuse_ddp_with_coalesced_op`,
/// `fuse_ddp_with_concat_op`, `schedule_comm_wait`); it carries our name. `bucket_bytes`: the cap
/// of all buckets; none: that of the replicated module, or 1 MiB for the first and 25 MiB for the
/// others. Throws a ValueError that
/// names the nearest known ones if there is none.
Pass find_pass(const std::string& name, std::optional<int64_t> bucket_bytes = std::nullopt);

/// Throws a ValueError that names the pass if one has no function.
void check_functions(const std::vector<Pass>& passes);
/// Throws a ValueError if a name in `disabled` is that of no pass, neither of the list nor ours.
void check_disabled(const std::vector<Pass>& passes, const std::vector<std::string>& disabled);
/// Throws a ValueError that names both if a pass comes before one that it must come after, or after
/// one that is neither of the list nor ours, or without one that it needs; or twice, if it may not.
void check_order(const std::vector<Pass>& passes);

/// Names of all passes, as find_pass takes them.
std::vector<std::string> pass_names();

}  // namespace tessera::compiler
