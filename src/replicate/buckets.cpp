#include "replicate/buckets.h"

#include "base/text.h"
#include "comm/backends.h"
#include "replicate/local_part.h"

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::replication {
namespace {

std::vector<at::Tensor> local_parts(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(local_part(tensor));
  return parts;
}

}  // namespace

Buckets::Buckets(const ManagedParameters& parameters, const IterationSettings& settings,
                 BucketsSettings buckets)
    : parameters_(parameters),
      module_name_(settings.module_name),
      group_(settings.group),
      settings_(std::move(buckets)) {
  const BucketLimits unlimited{.first = kUnlimited, .rest = kUnlimited};
  auto assignment =
      assign_buckets(local_parts(parameters_.tensors), parameters_.is_sparse,
                     settings_.learns_order ? unlimited : settings_.limits, {}, settings_.together);
  std::reverse(assignment.buckets.begin(), assignment.buckets.end());
  make(assignment);
}

void Buckets::make(const Assignment& assignment) {
  buckets_.clear();
  places_.resize(parameters_.tensors.size());
  for (const auto& members : assignment.buckets) {
    const auto device = parameters_.tensors[members[0]].device().type();
    // One rank alone has nothing to send: its gradients stay where they are.
    const bool may_work_in_place = !settings_.views && !is_flat_ &&
                                   (group_->getSize() == 1 || comm::shares_memory(*group_, device));
    const auto travel = parameters_.is_sparse[members[0]] ? Travel::Sparse
                        : may_work_in_place               ? Travel::InPlace
                                                          : Travel::Flat;
    for (size_t position = 0; position < members.size(); ++position)
      places_[members[position]] = {buckets_.size(), position};
    try {
      buckets_.emplace_back(
          members, parameters_.tensors,
          BucketSettings{.group = group_,
                         .travel = travel,
                         .gradients_are_views = settings_.views && travel == Travel::Flat,
                         .in_background = settings_.in_background});
    } catch (c10::OutOfMemoryError& error) {
      size_t bytes = 0;
      for (const size_t member : members) bytes += local_part(parameters_.tensors[member]).nbytes();
      error.add_context(c10::str(
          "replicate: expected ", format_bytes(bytes), " for a bucket of ", members.size(),
          " gradients of ", module_name_, ", '", parameters_.names[members[0]],
          "' among them; gradient_as_bucket_view = true keeps no second copy, fully_shard() takes "
          "less"));
      throw;
    }
  }
}

void Buckets::make_flat() {
  is_flat_ = true;
  Assignment same;
  for (const auto& bucket : buckets_) same.buckets.push_back(bucket.members());
  make(same);
}

bool Buckets::is_last(size_t bucket) const {
  return std::all_of(buckets_.begin() + static_cast<ptrdiff_t>(bucket) + 1, buckets_.end(),
                     [](const Bucket& other) { return other.is_sparse(); });
}

void Buckets::follow_order(std::vector<size_t> order, int source) {
  settings_.learns_order = false;
  // Unused ones of a static graph come last: they are ready before any other.
  std::vector<bool> is_ordered(parameters_.tensors.size(), false);
  for (const size_t index : order) is_ordered[index] = true;
  for (size_t i = 0; i < is_ordered.size(); ++i) {
    if (!is_ordered[i]) order.push_back(i);
  }
  const auto own = at::tensor(std::vector<int64_t>(order.begin(), order.end()), at::kLong);
  const auto device = parameters_.tensors[0].device();
  std::vector<at::Tensor> sent{own.to(device)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.asyncOp = false;
  const auto work = group_->getBackend(device.type())->broadcast(sent, options);
  if (work) work->wait();
  const auto agreed = sent[0].cpu();
  const auto* indices = agreed.const_data_ptr<int64_t>();
  make(assign_buckets(local_parts(parameters_.tensors), parameters_.is_sparse, settings_.limits,
                      std::vector<size_t>(indices, indices + agreed.numel()), settings_.together));
}

}  // namespace tessera::replication
