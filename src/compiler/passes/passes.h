#pragma once

#include <tessera/compile/graph.h>

/// The passes: each computes the same with less, or sooner.
namespace tessera::compiler {

/// How large the buckets of collectives become: one is closed by the tensor with which it reaches
/// its cap. The first closes early, so that communication starts early.
struct BucketCaps {
  int64_t first = int64_t{1} << 20;
  int64_t later = int64_t{25} << 20;
};

void remove_dead_code(Graph& graph);  // what no output needs
void merge_equal(Graph& graph);       // the same of the same, once: also collectives and waits
void drop_again(Graph& graph);        // marks that kept merge_equal from undoing recomputation
void skip_overwritten(Graph& graph);  // copies into what is overwritten as a whole
void fold_constants(Graph& graph);    // views, copies and arithmetic that change nothing
void compress(Graph& graph, at::ScalarType dtype);  // averages gradients in a 16-bit type

// Few large collectives in place of many small ones; the number of buckets of all-reduces becomes
// counters()["ddp_buckets"].
void bucket_all_reduces(Graph& graph, const BucketCaps& caps);            // as lists of tensors
void bucket_all_reduces_by_concat(Graph& graph, const BucketCaps& caps);  // as one tensor
void bucket_all_reduces_by_size(Graph& graph, const BucketCaps& caps);    // small ones as one
void bucket_reduce_scatters(Graph& graph, const BucketCaps& caps);
void bucket_all_gathers(Graph& graph, const BucketCaps& caps);

void launch_early(Graph& graph);    // collectives right behind what they need
void schedule_waits(Graph& graph);  // waits just before somebody needs the result
void reuse_memory(Graph& graph);    // operators write over what nobody needs any more

}  // namespace tessera::compiler
