#pragma once

#include <tessera/fully_shard/options.h>
#include <tessera/trace.h>

#include <c10/util/Exception.h>

#include <string>

namespace tessera::detail::fully_shard {

/// Adds what this thread is in messages for while it lives.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), begun_(communication_seconds()) {}
  ~Timed() { seconds_ += communication_seconds() - begun_; }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  double begun_;
};

/// Where a unit's values are; FSDP2's sharded state.
enum class Values {
  Sharded,    // parameters are shards, nothing else is in memory
  Gathering,  // the same, and a gather is under way for a use that comes soon
  Kept,       // parameters are shards, unsharded values are in memory
  Unsharded,  // parameters show them
};

/// Where its gradients are.
enum class Gradients {
  Idle,        // in the parameters
  Collecting,  // those were put aside; what backward brings is taken
  Collected,   // put aside; all that comes has come, nothing is on its way between ranks
  Reducing,    // put aside; those of this backward are on their way
  Abandoned,   // in the parameters; those of a backward that failed are on their way
};

/// A unit's life. Values and gradients go on by themselves: a unit is sharded again while its
/// gradients are on their way, and gradients come to one that was never unsharded. Either changes
/// by a transition alone, which is an error where it may not begin.
class UnitLife {
 public:
  Values values() const { return values_; }
  bool is_unsharded() const { return values_ == Values::Unsharded; }
  Gradients gradients() const { return gradients_; }
  bool is_collecting() const { return gradients_ == Gradients::Collecting; }
  bool is_reducing() const {
    return gradients_ == Gradients::Reducing || gradients_ == Gradients::Abandoned;
  }
  /// Whether parameters wait for their gradients.
  bool has_put_aside() const {
    return gradients_ != Gradients::Idle && gradients_ != Gradients::Abandoned;
  }

  void begin_gather() { move(values_, Values::Sharded, Values::Gathering); }
  void end_gather() { move(values_, Values::Gathering, Values::Kept); }
  void drop_gather() { move(values_, Values::Gathering, Values::Sharded); }
  void unshard() { move(values_, Values::Kept, Values::Unsharded); }
  void reshard() { move(values_, Values::Unsharded, Values::Kept); }
  void free() { move(values_, Values::Kept, Values::Sharded); }

  void begin_backward() { move(gradients_, Gradients::Idle, Gradients::Collecting); }
  void end_backward() { move(gradients_, Gradients::Collecting, Gradients::Collected); }
  void begin_reduction() { move(gradients_, Gradients::Collected, Gradients::Reducing); }
  void end_reduction() { move(gradients_, Gradients::Reducing, Gradients::Collected); }
  void deliver() { move(gradients_, Gradients::Collected, Gradients::Idle); }
  /// From any: what is on its way, if something is, is nobody's.
  void abandon_backward() { gradients_ = is_reducing() ? Gradients::Abandoned : Gradients::Idle; }
  void discard() { gradients_ = Gradients::Idle; }

 private:
  /// Every transition comes by here.
  template <class Stage>
  static void move(Stage& stage, Stage from, Stage to) {
    TORCH_INTERNAL_ASSERT(stage == from, "a unit of fully_shard can't go from stage ",
                          static_cast<int>(stage), " to ", static_cast<int>(to));
    stage = to;
  }

  Values values_ = Values::Sharded;
  Gradients gradients_ = Gradients::Idle;
};

/// A parameter as it was when fully_shard found it.
struct FoundParameter {
  at::Tensor tensor;
  std::string name;          // relative to the module
  bool keeps_dtype = false;  // mixed precision leaves its module alone
  int64_t shard_dim = 0;     // along which it is cut
};

struct SummonSettings {
  bool with_grads;
  bool shows;  // false: this rank only takes part in gathering
};

/// What a unit keeps while copies are shown.
struct Summoned {
  SummonSettings settings;
  std::vector<at::Tensor> gradients;  // the parameters' own meanwhile
};

/// What stays in memory of gathered parameters that nobody reads.
enum class Keep {
  Nothing,
  Part,  // what neighbours need to make them whole again, if the unit has neighbours
  All,
};

struct UnitSettings {
  std::string name;  // of the module, for messages
  DeviceMesh mesh;   // 1-D, or 2-D: copies, shards
  Group group;  // over whose ranks parameters are split; null: along the last dimension of the mesh
  Group neighbours;  // of Keep::Part; null: none
  bool is_split;     // NO_SHARD: false
  int64_t number;    // equal on all ranks
  MixedPrecision precision;
  bool accumulate_sharded;
  bool offloads;  // shards and gradients lie in the CPU's memory
};

}  // namespace tessera::detail::fully_shard
