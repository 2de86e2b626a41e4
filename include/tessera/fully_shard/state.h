#pragma once

#include <tessera/fully_shard/options.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// What a unit did since it was made.
struct FullyShardStats {
  int64_t gathers = 0;          // times its parameters were made whole
  int64_t reductions = 0;       // times its gradients were reduced
  int64_t parameter_bytes = 0;  // of its parameters, whole, as they are kept
  int64_t shard_bytes = 0;      // of these, this rank's
  int64_t gathered_bytes = 0;   // private memory it takes while it is whole; 0 where the whole is
                                // shared memory, seen in place
  int64_t freed_bytes = 0;      // private memory freed by resharding, all times together
  int64_t kept_bytes = 0;       // kept at the moment between forward and backward, where
                                // reshard_after_forward is a number of ranks
  int64_t communicated_bytes = 0;    // of whole values that were gathered (none where they are seen
                                     // in place) and of whole gradients that were reduced
  double communication_seconds = 0;  // that the calling thread was in messages for it, at work or
                                     // waiting: on a GPU not those of the device. As the bytes: of
                                     // what programs send nothing is counted
};

/// What fully_shard keeps with a module.
class FullyShardState {
 public:
  virtual ~FullyShardState() = default;
  /// Names of the parameters of its unit, relative to the module; those of units inside it are
  /// theirs.
  virtual std::vector<std::string> param_names() const = 0;
  /// Whether it is the outermost; known after the first forward.
  virtual bool is_root() const = 0;
  virtual bool is_unsharded() const = 0;
  virtual bool requires_gradient_sync() const = 0;
  virtual ShardingStrategy strategy() const = 0;
  virtual FullyShardStats stats() const = 0;
};

}  // namespace tessera
