#pragma once

#include <tessera/comm.h>

#include "fully_shard/packing.h"

#include <c10/core/Event.h>

#include <optional>

namespace tessera::sharded {

struct ReductionSettings {
  Group group;       // over which gradients are reduced, and scattered if `is_split`
  Group copies;      // hybrid: over which the shards are reduced after that; null: none
  bool is_split;     // false: every rank gets all
  int64_t number;    // of the unit, equal on all ranks
  std::string unit;  // for messages
  c10::Device device;
  std::vector<at::ScalarType> dtypes;  // on the way, by parameter
};

/// Averages the gradients of one unit over the ranks and gives each rank its part.
class Reduction {
 public:
  /// Nothing is a member at first.
  Reduction(std::vector<Rows> rows, ReductionSettings settings);

  /// Parameters whose gradients travel; the same on all ranks.
  void set_members(std::vector<bool> is_member);
  bool is_member(size_t index) const { return is_member_[index]; }
  /// On the way.
  at::ScalarType dtype(size_t index) const { return settings_.dtypes[index]; }

  /// Sums are divided by it instead of by the number of ranks.
  void divide_by(double factor) {
    factor_ = factor;
    checked_later_.reset();  // was averaged by another rule
  }
  std::optional<double> divisor() const { return factor_; }
  /// Hybrid: false keeps what was reduced within the sharding group until copies are reduced again.
  void set_reduces_copies(bool reduces) { reduces_copies_ = reduces; }
  /// Whether something is kept so, and whether the next reduction ends that.
  bool has_held() const { return !held_.empty(); }
  bool has_due() const { return has_held() && reduces_copies_; }
  bool reduces_copies() const { return reduces_copies_; }
  void drop_held() { held_.clear(); }
  /// Takes whole gradients, undefined where there is none. Every rank calls it, for units in one
  /// order. Returns with the result unless `in_background`.
  void start(const std::vector<at::Tensor>& gradients, bool in_background);
  /// The same by operators that a recorder sees.
  void start_by_operators(const std::vector<at::Tensor>& gradients);
  /// Waits. This rank's parts, in the dtypes of the way; undefined where no rank had a gradient.
  std::vector<at::Tensor> finish();

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
  at::Tensor make_extra(const std::vector<at::Tensor>& gradients) const;
  at::Tensor extra_for(const std::vector<at::Tensor>& gradients);
  std::vector<bool> agree_on_used(const std::vector<at::Tensor>& gradients) const;
  std::vector<at::Tensor> reduce_by_operators(const std::vector<size_t>& members,
                                              const std::vector<at::Tensor>& gradients) const;
  void launch(bool in_background);
  void reduce_copies();
  std::vector<at::Tensor> received() const;
  void check_number(const std::vector<float>& extra) const;
  void check_number_later();
  void add_held();
  std::vector<at::Tensor> results() const;
  std::vector<float> read_extra() const;
  bool is_alone() const { return ranks_ == 1 && !settings_.copies; }
  c10d::ReduceOp operation() const;

  std::vector<Rows> rows_;
  ReductionSettings settings_;
  int64_t ranks_;
  std::vector<bool> is_member_;
  std::optional<double> factor_;
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
  std::vector<at::Tensor> own_;           // one rank: what it gave
  std::vector<at::Tensor> by_operators_;  // results of start_by_operators()
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace tessera::sharded
