#pragma once

#include <tessera/fully_shard/state.h>

#include "dtensor/spec.h"
#include "fully_shard/face.h"
#include "fully_shard/reduction.h"
#include "fully_shard/source.h"
#include "fully_shard/streams.h"
#include "fully_shard/unit_settings.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::sharded {

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
  const std::vector<TwoFaced>& parameters() const { return parameters_; }
  const UnitSettings& settings() const { return settings_; }
  const Group& group() const { return group_; }
  bool has_trainable() const;
  bool has_frozen() const;
  bool works_in_background() const { return source_ && source_->works_in_background(); }

  // --- values
  /// Begins to gather, if that takes time, for a use that comes soon.
  void prefetch(Use use);
  /// A prefetch that no use came for.
  void drop_prefetch();
  /// Parameters are whole from here on.
  void show_whole(Use use);
  /// Parameters are shards again; memory stays for a later use.
  void show_shards(Keep keep);
  /// Whether parameters are whole in their own dtypes or in mixed precision's. Nothing happens
  /// while they are whole.
  void compute_in_full(bool full);
  bool is_whole() const { return is_whole_; }
  void note_reduction();  // a recorder watches from now on how gradients are reduced
  void end_recorded();    // no backward comes for what a recorded forward made whole
  /// Throws in the name of `function` unless parameters are what they are outside of computation.
  void require_shards(const char* function) const;

  // --- copies
  /// Parameters are private whole copies from here on; collective.
  void summon(SummonSettings settings);
  /// And shards again; `writes`: with the copies' values.
  void dismiss(bool writes);
  /// Of the mesh, and of those of tensor parallel parameters.
  bool is_on_first_rank() const;

  // --- gradients
  void begin_backward();
  bool has_gradients() const;
  bool has_all_gradients() const { return arrived_ == expected_; }
  /// Called when the last gradient has come.
  std::function<void()> on_complete;
  /// Called before a gradient comes to a unit that is not split and not in backward, so that it can
  /// begin one.
  std::function<void()> on_stray;
  /// Reduces what has come, or only adds it up if not `synchronise`. deliver() waits and puts the
  /// result into the parameters, or begins to copy it to the host and leaves the rest to
  /// end_delivery(); drop_delivery() forgets it after a failure.
  void reduce(bool synchronise, bool in_background);
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
  Reduction* reduction() { return reduction_.get(); }
  bool requires_sync = true;
  std::string where;  // how messages name it: the module's class, or its place in the model

  FullyShardStats stats() const;

 private:
  void make_source(const std::vector<FoundParameter>& found);
  void make_faces(const std::vector<FoundParameter>& found);
  at::Tensor inside_of(size_t index, const at::Tensor& whole) const;
  bool begin_recorded(Use use);
  void note_writing();
  void gather_recorded();
  void start(Use use);
  void gather(Use use);
  void await_readers();
  void lend();
  void notice_writes();
  void free();
  void hook_gradients();
  void check_unwritten() const;
  void check_unexchanged() const;
  void choose_reduced();
  void before_gradient(size_t index);
  bool take_gradient(size_t index);
  void put_back_gradients();
  void refuse_stray(size_t index) const;
  bool is_of_outside(size_t index, const at::Tensor& gradient) const;
  at::Tensor local_gradient(size_t index, const at::Tensor& gradient) const;
  at::Tensor outside_gradient(size_t index, at::Tensor local) const;
  void add_aside(size_t index, const at::Tensor& gradient);

  UnitSettings settings_;
  Group group_, copies_;  // over which parameters are split; hybrid
  std::vector<std::string> names_;
  std::vector<Rows> rows_;
  std::vector<TwoFaced> parameters_;
  std::unique_ptr<Source> source_;
  std::unique_ptr<Reduction> reduction_;
  std::vector<bool> is_hooked_;

  bool is_started_ = false;                             // a gather is under way
  bool is_filled_ = false;                              // the whole values are in memory
  bool is_stale_ = false;                               // shards were written since
  bool is_updated_ = false, compares_updates_ = false;  // between reductions; whether all would be
  bool is_lent_ = false;                                // somebody holds a shard's memory
  int64_t seen_writes_ = 0;                             // to what was lent
  bool is_whole_ = false;                               // parameters show them
  bool is_full_ = false;              // in their own dtypes, whatever mixed precision says
  std::vector<at::Tensor> recorded_;  // whole values made by operators; empty: not recorded
  bool is_recorded_kept_ = false;     // they serve backward, too
  uint64_t recording_ = 0;            // in which they were made
  bool is_in_backward_ = false, is_reducing_ = false, has_unreduced_ = false;
  size_t arrived_ = 0, expected_ = 0;
  std::vector<bool> has_arrived_, has_own_;        // gradients: whole ones, of the shards alone
  std::vector<at::Tensor> gradients_, unreduced_;  // of this backward, of batches before; whole
  std::vector<at::Tensor> aside_;                  // the parameters' gradients while backward runs,
  bool is_aside_ = false;                          // if they are
  std::optional<Delivery> delivery_;
  std::unique_ptr<Summoned> summoned_;
  FullyShardStats stats_;
};

}  // namespace tessera::sharded
