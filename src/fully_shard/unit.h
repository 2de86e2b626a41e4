#pragma once

#include <tessera/fully_shard/state.h>

#include "dtensor/spec.h"
#include "fully_shard/reduction.h"
#include "fully_shard/sharded_parameter.h"
#include "fully_shard/source.h"
#include "fully_shard/streams.h"
#include "fully_shard/unit_state.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::detail::fully_shard {

/// Parameters that are gathered together and whose gradients are reduced together. Knows nothing of
/// modules and hooks: State and Tree tell it what comes.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  Unit(const std::vector<FoundParameter>& parameters, UnitSettings settings);
  ~Unit();
  /// Hooks the parameters and shards them. Apart from the constructor, which has no shared_ptr yet.
  void attach();

  bool is_empty() const { return parameters_.empty(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const UnitSettings& settings() const { return settings_; }
  const Group& group() const { return group_; }
  bool has_trainable() const;
  bool has_frozen() const;
  /// Whether messages are sent while this rank computes; never while a recorder watches.
  bool works_in_background() const;

  // --- values
  /// Begins to gather, if that takes time, for a use that comes soon.
  void prefetch(Use use);
  /// A prefetch that no use came for.
  void drop_prefetch();
  /// Parameters are whole from here on.
  void unshard(Use use);
  /// Parameters are shards again; memory stays for a later use.
  void reshard(Keep keep, bool expects_backward);
  /// Whether parameters are whole in their own dtypes or in mixed precision's. Nothing happens
  /// while they are whole.
  void compute_in_full(bool full);
  bool is_unsharded() const { return life_.is_unsharded(); }
  /// Throws in the name of `function` unless parameters are what they are outside of computation.
  void require_sharded(const char* function) const;

  // --- copies
  /// Parameters are private whole copies from here on; collective.
  void summon(SummonSettings settings);
  /// And shards again; `writes`: with the copies' values.
  void end_summon(bool writes);
  /// Of the mesh, and of those of tensor parallel parameters.
  bool is_on_first_rank() const;

  // --- gradients
  void begin_backward();
  /// Whether those of a backward wait for deliver().
  bool has_undelivered() const;
  bool has_gradients() const;
  bool has_all_gradients() const { return arrived_ == expected_; }
  /// Called when the last gradient has come.
  std::function<void()> on_complete;
  /// Called before a gradient comes to a unit that is not split and not in backward, so that it can
  /// begin one.
  std::function<void()> on_unexpected_gradient;
  /// Reduces what has come, if requires_sync, or only adds it up. deliver() waits and puts the
  /// result into the parameters, or begins to copy it to the host and leaves the rest to
  /// end_delivery(); drop_delivery() forgets it after a failure.
  void reduce(bool in_background);
  void deliver(), end_delivery(), drop_delivery();
  /// Whether gradients of earlier batches wait to be reduced.
  bool has_unreduced() const;
  /// Waits, whatever comes of it, for what was sent in a backward that failed.
  void discard() noexcept;
  /// After a failure: forgets a backward, without waiting; and shows shards.
  void abandon_backward();
  void abandon_values();
  /// Forgets gradients of earlier batches; whether there were any.
  bool drop_unreduced();
  /// Null if there is nothing to reduce.
  EagerReduction* reduction() { return reduction_.get(); }
  bool requires_sync() const { return requires_sync_; }
  void set_requires_sync(bool required);
  std::string where;  // how messages name it: the module's class, or its place in the model
  FullyShardStats stats() const;

 private:
  void make_source(const std::vector<FoundParameter>& found);
  void make_parameters(const std::vector<FoundParameter>& found);
  /// Of this moment: the eager one, or that of a recording. See Note [recorded units].
  Source& source() { return recorded_ ? *recorded_ : *source_; }
  void choose_source(Use use);
  Reduction& choose_reduction();
  void end_recorded(), note_unreduced();
  void note_writing();
  void show_values_of(const Source& source);
  bool show_shards();
  void start(Use use);
  void gather(Use use);
  void finish_gather();
  void await_readers();
  void expose_shards();
  void notice_writes();
  void free();
  void hook_gradients();
  void choose_reduced();
  void before_gradient(size_t index);
  bool take_gradient(size_t index);
  void put_back_gradients();
  void refuse_unexpected(size_t index) const;
  at::Tensor local_gradient(size_t index, const at::Tensor& gradient) const;
  at::ScalarType dtype_of_sum(size_t index, const at::Tensor& gradient) const;
  std::string describe_reduction();

  UnitSettings settings_;
  Group group_, copies_;  // over which parameters are split; hybrid
  std::vector<std::string> names_;
  std::vector<ShardLayout> rows_;
  std::vector<ShardedParameter> parameters_;
  std::unique_ptr<Source> source_;
  std::unique_ptr<EagerReduction> reduction_;
  std::unique_ptr<Source> recorded_;  // null: this use is not recorded
  uint64_t recording_ = 0;            // for which it was made
  std::unique_ptr<Reduction> recorded_reduction_;
  Reduction* reducing_ = nullptr;  // the one of both that gradients went to last
  std::vector<bool> is_hooked_;
  bool requires_sync_ = true;

  UnitLife life_;
  bool is_stale_ = false;                               // shards were written since they were read
  bool is_updated_ = false, compares_updates_ = false;  // between reductions; whether all would be
  std::optional<int64_t> seen_writes_;  // to shards whose memory somebody holds; none: nobody does
  bool is_full_ = false;                // in their own dtypes, whatever mixed precision says
  size_t arrived_ = 0, expected_ = 0;
  std::vector<bool> has_arrived_, has_own_;        // gradients: whole ones, of the shards alone
  std::vector<at::Tensor> gradients_, unreduced_;  // of this backward; of batches before, if any
  std::vector<at::Tensor> aside_;                  // the parameters' own while backward runs
  std::optional<Delivery> delivery_;
  std::unique_ptr<Summoned> summoned_;
  FullyShardStats stats_;
};

}  // namespace tessera::detail::fully_shard
