#include "compiler/pipeline.h"

#include "compiler/passes/passes.h"
#include "compiler/passes/run.h"

namespace tessera::compiler {

void optimise(Graph& graph, const CompileOptions& options, const std::vector<Pass>& further) {
  // In this order: what is not there need not be bucketed; a wait belongs to a bucket; memory is
  // reused last, since no pass may move a node past one that overwrites its arguments.
  std::vector<Pass> passes = {
      {"remove_dead_code", remove_dead_code},
      {"fold_constants", fold_constants},
      {"merge_equal", merge_equal},
      {"launch_early", launch_early},
      find_pass("bucket_all_reduces_by_concat"),
      find_pass("bucket_reduce_scatters"),
      find_pass("bucket_all_gathers"),
      {"schedule_waits", schedule_waits},
  };
  passes.insert(passes.end(), further.begin(), further.end());
  passes.insert(passes.end(), options.passes.begin(), options.passes.end());
  passes.push_back({"reuse_memory", reuse_memory});
  run_passes(graph, passes,
             {.disabled = options.disabled_passes, .dump_folder = options.dump_folder});
}

}  // namespace tessera::compiler
