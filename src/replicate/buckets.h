#pragma once

#include <tessera/replicate/comm_hooks.h>

#include "replicate/bucket_assignment.h"
#include "replicate/iteration.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::detail::replicate {

/// Part of a flat buffer with the parameter's shape and strides. Not a view to autograd: zero_grad
/// detaches gradients, which views refuse.
at::Tensor view_of(const at::Tensor& buffer, const at::Tensor& parameter, int64_t offset);

/// How the gradients of a bucket travel.
enum class Transport {
  InPlace,  // large ones, and all of a rank alone, are reduced where they are, small ones through
            // the flat buffer
  Flat,     // all through the flat buffer: comm hooks, bucket views, and backends that want one
            // message
  Sparse,   // one gradient, its indices and values gathered
};

struct BucketSettings {
  Group group;
  Transport travel;
  bool gradients_are_views;  // only with Transport::Flat
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
  bool is_sparse() const { return transport_ == Transport::Sparse; }

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
    at::Tensor unpacked;  // by itself: the gradient, or what stands in for it
    bool is_missing = false;
  };
  bool is_alone() const { return group_->getSize() == 1; }
  void make_buffer(const BucketSettings& settings);
  void put(Slot& slot, const at::Tensor& gradient);
  c10::intrusive_ptr<c10d::Work> reduce();
  void reduce_sparse();

  Group group_;
  Transport transport_;
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

struct BucketsSettings {
  BucketLimits limits;
  bool views;  // gradients are views of buckets
  bool in_background;
  bool learns_order;             // gradients come in an order that is the same in each iteration
  std::vector<size_t> together;  // one bucket, sent when the last of them has come
};

/// Which gradients travel together, and in which order: the one in which they came on one rank.
/// Until that is known, one bucket per kind; where it can't be learned, the last registered come
/// first.
class Buckets {
 public:
  Buckets(const ManagedParameters& parameters, const IterationSettings& settings,
          BucketsSettings buckets);

  std::vector<Bucket>& all() { return buckets_; }
  const std::vector<Bucket>& all() const { return buckets_; }
  struct Place {
    size_t bucket;
    size_t position;
  };
  Place place_of(size_t parameter) const { return places_[parameter]; }
  /// Of those that are sent as they fill: sparse ones come at the end.
  bool is_last(size_t bucket) const;
  /// The same ones, as a comm hook wants them: flat.
  void make_flat();

  bool learns_order() const { return settings_.learns_order; }
  /// Makes them again, by group rank `source`'s order; a collective.
  void follow_order(std::vector<size_t> order, int source);

 private:
  void make(const Assignment& assignment);

  const ManagedParameters& parameters_;
  std::string module_name_;
  Group group_;
  BucketsSettings settings_;
  bool is_flat_ = false;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter
};

}  // namespace tessera::detail::replicate
