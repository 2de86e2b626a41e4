#pragma once

#include <tessera/compile/pass.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

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
