#pragma once

#include "replicate/bucket.h"
#include "replicate/bucket_assignment.h"
#include "replicate/iteration.h"

namespace tessera::replication {

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

}  // namespace tessera::replication
