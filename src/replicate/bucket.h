#pragma once

#include <tessera/replicate/comm_hooks.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::replication {

/// Part of a flat buffer with the parameter's shape and strides. Not a view to autograd: zero_grad
/// detaches gradients, which views refuse.
at::Tensor view_of(const at::Tensor& buffer, const at::Tensor& parameter, int64_t offset);

/// How the gradients of a bucket travel.
enum class Travel {
  InPlace,  // large ones, and all of a rank alone, are reduced where they are, small ones through
            // the flat buffer
  Flat,     // all through the flat buffer: comm hooks, bucket views, and backends that want one
            // message
  Sparse,   // one gradient, its indices and values gathered
};

struct BucketSettings {
  Group group;
  Travel travel;
  bool gradients_are_views;  // only with Travel::Flat
  bool in_background;        // false: launch() returns with the result
};

/// Gradients that are averaged together.
class Bucket {
 public:
  Bucket(std::vector<size_t> members, const std::vector<at::Tensor>& parameters,
         const BucketSettings& settings);

  const std::vector<size_t>& members() const { return members_; }
  size_t bytes() const { return bytes_; }
  size_t pending() const { return pending_; }  // members that it has nothing of yet
  bool is_complete() const { return pending_ == 0; }
  bool is_sparse() const { return travel_ == Travel::Sparse; }

  /// Forgets the last iteration.
  void reset();
  /// The member's gradient is in its parameter.
  void collect(size_t position);
  /// The member has none in this iteration: its old one, or zeros, travels for it.
  void collect_missing(size_t position);
  /// All members are zero: another rank's gradients travel, this one has none.
  void collect_zeros();

  void launch(size_t index, bool is_last, const CommHook& hook);
  void wait();
  /// Waits, whatever comes of it, for what was launched in an iteration that is given up.
  void settle() noexcept;
  /// Multiplies the results.
  void scale(double factor);
  /// Puts the results into the parameters' gradients. `is_used` says of missing members whether
  /// any rank has a gradient for them; if not, what they have stays.
  void deliver(const std::vector<bool>& is_used);

 private:
  struct Slot {
    at::Tensor parameter;
    at::Tensor part;      // what this rank holds of it
    at::Tensor view;      // of the flat buffer; undefined if the gradient travels by itself
    at::Tensor traveler;  // by itself: the gradient, or what stands in for it
    bool is_missing = false;
  };
  bool is_alone() const { return group_->getSize() == 1; }
  void make_buffer(const BucketSettings& settings);
  void put(Slot& slot, const at::Tensor& gradient);
  c10::intrusive_ptr<c10d::Work> reduce();
  void reduce_sparse();

  Group group_;
  Travel travel_;
  bool gradients_are_views_;
  bool in_background_;
  std::vector<size_t> members_;
  std::vector<Slot> slots_;
  size_t bytes_ = 0;
  size_t pending_ = 0;
  at::Tensor buffer_;
  c10::intrusive_ptr<c10d::Work> work_;
  BucketFuture future_;
};

}  // namespace tessera::replication
