#pragma once

#include <tessera/comm.h>

#include "comm/group_memory.h"
#include "fully_shard/shard_layout.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace tessera::detail::fully_shard {

/// Memory that can be freed and filled again under the same storage: views of it that autograd
/// saved come back to life with it. A read while it is free is an error that says why; without
/// kCanRefuseAccess it is one of an empty storage, or an access to address 0.
class Buffer {
 public:
  /// Free at first.
  Buffer(size_t bytes, c10::Device device);

  size_t bytes() const { return bytes_; }
  /// Memory for the bytes, of any values.
  void fill();
  /// On a device, whoever gets the memory next waits for what is queued by now on the current
  /// stream, and on those of keep_for_current_stream().
  void free();
  void keep_for_current_stream() const;
  /// A tensor in it.
  at::Tensor view(size_t offset, c10::IntArrayRef sizes, at::ScalarType dtype) const;

 private:
  size_t bytes_;
  c10::Device device_;
  c10::Storage storage_;
  bool is_filled_ = false;
};

/// Where tensors lie in one piece of memory, one after the other, each at the start of a cache
/// line.
class Places {
 public:
  /// Offset of one more tensor.
  size_t add(size_t bytes);
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

/// What a unit's parameters are made whole for.
enum class Use { Forward, Backward };

/// One parameter as a source sees it.
struct SourceParameter {
  at::Tensor value;  // what it starts with, whole
  ShardLayout rows;
  at::ScalarType compute_dtype;
  int64_t shard_dim = 0;
};

/// Where the whole values of a unit's parameters come from, and where its shards lie.
class Source {
 public:
  virtual ~Source() = default;

  /// This rank's parts, in the parameters' own dtypes: what optimizers write.
  const std::vector<at::Tensor>& shards() const { return shards_; }
  /// The whole parameters in the dtypes of computation, readable from finish() to free().
  const std::vector<at::Tensor>& unsharded() const { return unsharded_; }

  /// Begins to make them whole; every rank does, in the same order. finish() waits.
  virtual void start(Use use) = 0;
  virtual void finish() = 0;
  /// Whether a use has to begin with start(). `is_old`: nothing is in memory, or shards were, or
  /// may have been, written since.
  virtual bool must_start(Use, bool is_old) const { return is_old; }
  /// A use begins without start(), by what is in memory.
  virtual void reuse() {}
  /// Frees what private memory they take. False: they are readable as before.
  virtual bool free() = 0;
  /// Before free(), between forward and backward: keeps this rank's part of what its neighbours
  /// have as well, for the next start() for backward. Nothing where there are no such neighbours.
  virtual void keep_part() {}
  /// In the parameters' own dtypes instead of those of computation, from the next start() on; other
  /// tensors are unsharded() then. Nothing is whole, or on its way, when it is called.
  virtual void compute_in_full(bool full) = 0;
  /// Whether something happens between start() and finish() while this rank computes.
  virtual bool works_in_background() const { return false; }
  /// Private memory between finish() and free().
  virtual size_t private_bytes() const = 0;
  /// Private memory of what keep_part() kept.
  virtual size_t kept_bytes() const { return 0; }

  /// This rank has ended one use: it reads others' shards no more.
  virtual void end_use() {}
  /// Returns when no rank reads this one's shards any more.
  virtual void before_write() {}

 protected:
  std::vector<at::Tensor> shards_;
  std::vector<at::Tensor> unsharded_;
};

/// All values lie where this rank can read them: in its own memory (`memory` is null: a group of
/// one rank, or nothing is split), or in memory that the ranks of one host share. Nothing is copied
/// unless computation wants another dtype. See Note [who may write].
std::unique_ptr<Source> make_addressable_source(std::vector<SourceParameter> pieces, int rank,
                                                const std::string& purpose, const Group& group);
struct GatherSettings {
  Group group;          // null: this rank has all
  Group neighbours;     // of keep_part(): a part of the group; null: none
  c10::Device device;   // where parameters are whole
  bool on_cpu = false;  // shards lie in the CPU's memory, pinned
};
/// Shards travel by all-gather.
std::unique_ptr<Source> make_gathered_source(const std::vector<SourceParameter>& pieces,
                                             const GatherSettings& settings);
/// Operators that a recorder sees make the values of `eager`, which is left alone with its memory
/// and gates, whole. See Note [recorded units].
std::unique_ptr<Source> make_recorded_source(const Source& eager, std::vector<ShardLayout> rows,
                                             const Group& group);

}  // namespace tessera::detail::fully_shard
