// Adafactor for distributed parameters: what is summed over shards is summed for all parameters at
// once, so that a step sends two messages however many there are, unless both dimensions are
// sharded.
#include <tessera/dtensor.h>

#include "dtensor/part.h"
#include "optim/adafactor.h"

#include <ATen/Tensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/cat.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace tessera::optim {
namespace {

using dtensor::part_of;

/// Sums in float32 at least.
at::Tensor squares(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
  return wide.mul(wide);
}

Placements partial_alone(const Placements& placements) {
  Placements result;
  for (const Placement& placement : placements)
    result.push_back(placement.is_partial() ? placement : Replicate());
  return result;
}

/// Those of the sums, distributed tensors, that wait for the same ranks.
struct Message {
  dtensor::SpecPtr spec;  // Partial or Replicate
  at::ScalarType dtype;
  std::vector<size_t> members;
};

std::vector<Message> in_messages(const std::vector<at::Tensor>& sums) {
  std::vector<Message> messages;
  for (const auto i : c10::irange(sums.size())) {
    const dtensor::Spec& spec = *part_of(sums[i]).spec;
    if (!spec.has_partial) continue;
    const auto wanted = dtensor::make_spec(spec.mesh, partial_alone(spec.placements));
    const auto fits = [&](const Message& message) {
      return message.spec == wanted && message.dtype == sums[i].scalar_type();
    };
    const auto found = std::ranges::find_if(messages, fits);
    if (found != messages.end()) {
      found->members.push_back(i);
    } else {
      messages.push_back({wanted, sums[i].scalar_type(), {i}});
    }
  }
  return messages;
}

/// Replaces sums of which each rank has a part by the sums of all.
void reduce_together(std::vector<at::Tensor>& sums) {
  for (const Message& message : in_messages(sums)) {
    std::vector<at::Tensor> parts;
    std::vector<int64_t> lengths;
    for (const size_t i : message.members) {
      parts.push_back(part_of(sums[i]).local().reshape({-1}));
      lengths.push_back(parts.back().numel());
    }
    const at::Tensor packed = at::cat(parts);
    const at::Tensor waiting = dtensor::wrap(packed, message.spec, packed.sizes(),
                                             at::detail::defaultStrides(packed.sizes()));
    const Placements everywhere(message.spec->placements.size(), Replicate());
    const at::Tensor whole = DTensor::of(waiting).redistribute(everywhere);
    const auto results = part_of(whole).local().split_with_sizes(lengths);
    for (const auto k : c10::irange(results.size())) {
      at::Tensor& sum = sums[message.members[k]];
      const at::Tensor local = results[k].view(part_of(sum).local().sizes());
      sum = dtensor::wrap(local, dtensor::without_partial(part_of(sum).spec), sum.sizes(),
                          at::detail::defaultStrides(sum.sizes()));
    }
  }
}

bool is_whole_along(const at::Tensor& param, int64_t dim) {
  return std::ranges::none_of(part_of(param).spec->placements,
                              [&](const Placement& one) { return one.is_shard(dim); });
}

/// The mean of all second moments: the same from rows as from columns, so from those that this rank
/// has all of.
at::Tensor mean_of(const at::Tensor& param, const at::Tensor& row_var, const at::Tensor& col_var) {
  if (is_whole_along(param, param.dim() - 2) || !is_whole_along(param, param.dim() - 1))
    return row_var.mean(-2, /*keepdim=*/true);
  return col_var.mean(-1, /*keepdim=*/true);
}

at::Tensor root_of(const at::Tensor& sum) { return part_of(sum).local().sqrt(); }

class ShardedStep {
 public:
  ShardedStep(ParamBucket& bucket, size_t index, const AdafactorOptions& options,
              const LearningRate& lr)
      : bucket_(bucket),
        index_(index),
        param_(bucket.params[index]),
        grad_(DTensor::of(options.maximize ? bucket.grads[index].neg() : bucket.grads[index])
                  .redistribute(part_of(param_).spec->placements)),
        step_(options, lr, bucket.state[kAdafactorStep][index], param_) {}

  void add_sums(std::vector<at::Tensor>& sums) const {
    sums.push_back(squares(param_).sum());
    if (!is_matrix()) return;
    const at::Tensor of_grad = squares(grad_);
    sums.push_back(of_grad.sum(-1, /*keepdim=*/true));
    sums.push_back(of_grad.sum(-2, /*keepdim=*/true));
  }

  /// Takes what add_sums() gave from `next` on.
  void advance(std::vector<at::Tensor>::const_iterator& next) {
    param_norm_ = root_of(*next++);
    step_.decay(param_);
    if (!is_matrix()) return step_.advance(state(kVariance), grad_.mul(grad_));
    const auto dtype = param_.scalar_type();
    step_.advance(state(kRowVar), (*next++).div(grad_.size(-1)).to(dtype));
    step_.advance(state(kColVar), (*next++).div(grad_.size(-2)).to(dtype));
  }

  /// Calculated twice rather than kept for all parameters while norms are on their way.
  at::Tensor direction() const {
    if (!is_matrix()) return step_.direction(state(kVariance).clone(), grad_);
    const at::Tensor mean = mean_of(param_, state(kRowVar), state(kColVar));
    return step_.direction(step_.estimate(state(kRowVar), state(kColVar), mean), grad_);
  }

  at::Tensor sum_of_direction() const { return squares(direction()).sum(); }
  void descend(const at::Tensor& sum) const {
    step_.descend(param_, direction(), param_norm_, root_of(sum));
  }

 private:
  bool is_matrix() const { return param_.dim() > 1; }
  const at::Tensor& state(size_t which) const { return bucket_.state[which][index_]; }

  ParamBucket& bucket_;
  const size_t index_;
  const at::Tensor param_, grad_;
  const AdafactorStep step_;
  at::Tensor param_norm_;
};

}  // namespace

void adafactor_sharded(ParamBucket& bucket, const std::vector<size_t>& members,
                       const AdafactorOptions& options, const LearningRate& lr) {
  std::vector<ShardedStep> steps;
  for (const size_t i : members)
    if (part_of(bucket.params[i]).spec->is_member) steps.emplace_back(bucket, i, options, lr);
  std::vector<at::Tensor> sums;
  for (const ShardedStep& step : steps) step.add_sums(sums);
  reduce_together(sums);
  auto next = sums.cbegin();
  for (ShardedStep& step : steps) step.advance(next);
  sums.clear();
  for (const ShardedStep& step : steps) sums.push_back(step.sum_of_direction());
  reduce_together(sums);
  for (const auto i : c10::irange(steps.size())) steps[i].descend(sums[i]);
}

}  // namespace tessera::optim
