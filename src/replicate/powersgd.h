#pragma once

#include <tessera/replicate/comm_hooks.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <map>
#include <memory>
#include <random>
#include <vector>

namespace tessera {
namespace powersgd {

/// Kept between iterations, per parameter.
struct CompressionState {
  at::Tensor error;  // as the gradient
  at::Tensor q;      // [columns, rank]
  at::Tensor spare;  // random columns for those of q that died
};

/// How a gradient is compressed; rank 0: not at all.
struct Factors {
  int64_t rows;
  int64_t columns;
  int64_t rank;
  bool operator==(const Factors&) const = default;
};

/// A gradient in a bucket, and what is remembered of it.
struct Member {
  at::Tensor gradient;
  CompressionState* remembered;
};

/// Gradients of one shape, or a single one, that are compressed in one go.
struct Batch {
  Factors factors;
  std::vector<Member> members;

  int64_t count() const { return static_cast<int64_t>(members.size()); }
  at::Tensor matrices() const {  // [count, rows, columns]
    return together([&](const Member& member) {
      return member.gradient.reshape({factors.rows, factors.columns});
    });
  }
  /// Of each member, [count, ...]; that of a single one is a view.
  template <class Of>
  at::Tensor together(const Of& of) const {
    std::vector<at::Tensor> all;
    for (const auto& member : members) all.push_back(of(member));
    return all.size() == 1 ? all[0].unsqueeze(0) : at::stack(all);
  }
};

/// Which gradients of a bucket travel how.
struct Plan {
  std::vector<Batch> batches;
  std::vector<at::Tensor> uncompressed;
};

}  // namespace powersgd

struct PowerSGDState::Impl {
  explicit Impl(PowerSGDOptions given) : options(given), random(given.random_seed) {}

  BucketFuture average_bucket(GradBucket& bucket, std::shared_ptr<PowerSGDState> owner);
  powersgd::Factors factors_of(const at::Tensor& gradient) const;

  /// One bucket on its way.
  struct Round {
    at::Tensor buffer;
    at::Tensor own;  // before compression, with the old error
    powersgd::Plan plan;
    std::vector<at::Tensor> p, q;  // by batch
  };
  powersgd::Plan plan(GradBucket& bucket);
  std::vector<at::Tensor> prepare_q(const powersgd::Plan& plan, const at::Tensor& buffer);
  void reduce_p(Round& round, const Group& group) const;
  void decompress(const Round& round) const;
  uint64_t next_seed();

  PowerSGDOptions options;
  std::mt19937 random;
  int64_t iteration = 0;
  std::map<const at::TensorImpl*, powersgd::CompressionState> memory;  // by parameter
};

/// What PowerSGDState::hook() gives.
struct PowerSGDHook {
  std::shared_ptr<PowerSGDState> state;
  BucketFuture operator()(GradBucket& bucket) const;
};

}  // namespace tessera
