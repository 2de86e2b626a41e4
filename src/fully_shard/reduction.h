#pragma once

#include <tessera/comm.h>

#include "fully_shard/shard_layout.h"

#include <c10/core/Event.h>

#include <memory>
#include <optional>

namespace tessera::detail::fully_shard {

struct ReductionSettings {
  std::vector<ShardLayout> rows;  // by parameter
  Group group;                    // over which gradients are reduced, and scattered if `is_split`
  Group copies;      // hybrid: over which the shards are reduced after that; null: none
  bool is_split;     // false: every rank gets all
  int64_t number;    // of the unit, equal on all ranks
  std::string unit;  // for messages
  c10::Device device;
  std::vector<at::ScalarType> dtypes;  // on the way, by parameter
  std::vector<bool> is_member = {};    // by parameter: travels; the same on all ranks
  std::optional<double> factor = {};   // by which sums are divided; none: by the number of ranks

  int64_t ranks() const { return group->getSize(); }
  bool is_alone() const { return ranks() == 1 && !copies; }
  c10d::ReduceOp operation() const;
  /// What the ranks tell each other with their gradients, and what they told if all told the same.
  at::Tensor make_extra(const std::vector<at::Tensor>& gradients) const;
  void check_number(const std::vector<float>& extra) const;
};

/// Averages the gradients of one unit over the ranks and gives each rank its part.
class Reduction {
 public:
  virtual ~Reduction() = default;
  /// Takes whole gradients, undefined where there is none. Every rank calls it, for units in one
  /// order. Returns with the result unless `in_background`.
  virtual void start(const std::vector<at::Tensor>& gradients, bool in_background) = 0;
  /// Waits. This rank's parts, in the dtypes of the way; undefined where no rank had a gradient.
  virtual std::vector<at::Tensor> finish() = 0;
};

/// By operators that a recorder sees, with settings that stay where they are until finish().
std::unique_ptr<Reduction> make_recorded_reduction(const ReductionSettings& settings);

/// In few messages; gradients of several batches may be kept on the way.
class EagerReduction final : public Reduction {
 public:
  /// Nothing is a member at first.
  explicit EagerReduction(ReductionSettings settings);

  const ReductionSettings& settings() const { return settings_; }
  void set_members(std::vector<bool> is_member);
  bool is_member(size_t index) const { return settings_.is_member[index]; }
  /// On the way.
  at::ScalarType dtype(size_t index) const { return settings_.dtypes[index]; }

  /// Sums are divided by it instead of by the number of ranks.
  void divide_by(double factor) {
    settings_.factor = factor;
    checked_later_.reset();  // was averaged by another rule
  }
  std::optional<double> divisor() const { return settings_.factor; }
  /// Hybrid: false keeps what was reduced within the sharding group until copies are reduced again,
  /// and adds it up in float32 at least: a sum of many batches in a low dtype loses the later ones.
  void set_reduces_copies(bool reduces) { reduces_copies_ = reduces; }
  /// Whether something is kept so, and whether the next reduction ends that.
  bool has_held() const { return !held_.empty(); }
  bool has_due() const { return has_held() && reduces_copies_; }
  bool reduces_copies() const { return reduces_copies_; }
  void drop_held() { held_.clear(); }
  void start(const std::vector<at::Tensor>& gradients, bool in_background) override;
  std::vector<at::Tensor> finish() override;

 private:
  struct Message {
    const Packing* packing;
    at::Tensor sent;  // a row for each rank; undefined if nothing is packed
    at::Tensor received;
    std::vector<at::Tensor> alone_sent;
    std::vector<at::Tensor> alone_received;
  };
  Message make_message(const Packing& packing, const std::vector<at::Tensor>& gradients);
  void pack_member(const Packing& packing, size_t position, const at::Tensor& gradient,
                   const at::Tensor& rows) const;
  void pack_together(const Packing& packing, const std::vector<at::Tensor>& gradients,
                     const at::Tensor& rows) const;
  at::Tensor pack_rows(const Packing& packing, const std::vector<at::Tensor>& gradients);
  at::Tensor extra_for(const std::vector<at::Tensor>& gradients);
  void launch(bool in_background);
  void reduce_copies();
  std::vector<at::Tensor> received() const;
  void check_number_later();
  void hold();
  void add_held();
  std::vector<at::Tensor> results() const;
  std::vector<float> read_extra() const;

  ReductionSettings settings_;
  bool reduces_copies_ = true;
  std::vector<Packing> packings_;
  std::vector<Message> messages_;
  bool is_complete_ = true;        // this rank had a gradient for every member
  at::Tensor extra_;               // on a device, as it was sent last
  std::vector<bool> extra_tells_;  // what that says of gradients
  at::Tensor checked_later_;       // of an earlier reduction, on its way to the host
  std::optional<c10::Event> copied_;
  std::vector<at::Tensor>
      held_;  // received in batches before this one, not yet averaged over copies
  std::vector<at::Tensor> own_;  // one rank: what it gave
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace tessera::detail::fully_shard
