#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// How graphs are compiled, besides the options of each call. Of this thread; see ConfigPatch.
struct CompileConfig {
  /// Passes over averages of gradients, in this order, by our names or upstream's:
  /// "fuse_ddp_with_concat_op" makes buckets of one tensor, "fuse_ddp_with_coalesced_op" of a list,
  /// "bucket_all_reduces_by_size" of one tensor and of the large ones as they are;
  /// "schedule_comm_wait" ("schedule_waits") puts waits off.
  std::vector<std::string> fuse_ddp_passes = {"bucket_all_reduces_by_size", "schedule_waits"};
  /// Whether collectives move up to what they need.
  bool reorder_for_locality = true;
  /// What compile() does with a replicated module. "python_reducer", "ddp_optimizer": averages are
  /// operators of the graph. "python_reducer_without_compiled_forward": the same, but
  /// compile(module) runs forward as it is. "no_optimization": replicate's engine averages, and
  /// what it takes part in runs as it is.
  std::string optimize_ddp = "python_reducer";
  /// Where buckets end; none: at 1 MiB for the first, 25 MiB for the others.
  std::optional<int64_t> bucket_bytes = std::nullopt;

  bool operator==(const CompileConfig&) const = default;
};

const CompileConfig& compile_config();

/// What differs from the configuration around it, while it lives:
///
///   ConfigPatch patch({.fuse_ddp_passes = {{"fuse_ddp_with_coalesced_op",
///   "schedule_comm_wait"}}});
class ConfigPatch {
 public:
  struct Changes {
    std::optional<std::vector<std::string>> fuse_ddp_passes = std::nullopt;
    std::optional<bool> reorder_for_locality = std::nullopt;
    std::optional<std::string> optimize_ddp = std::nullopt;
    std::optional<int64_t> bucket_bytes = std::nullopt;
  };
  explicit ConfigPatch(const Changes& changes);
  ~ConfigPatch();
  ConfigPatch(const ConfigPatch&) = delete;
  ConfigPatch& operator=(const ConfigPatch&) = delete;

 private:
  CompileConfig before_;
};

}  // namespace tessera
