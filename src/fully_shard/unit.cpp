#include "fully_shard/unit.h"

#include "dtensor/part.h"
#include "dtensor/registration.h"
#include "fully_shard/collect.h"
#include "fully_shard/placement.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace tessera::sharded {
namespace {

using dtensor::has_part;
using dtensor::part_of;

at::Tensor local_of(const at::Tensor& tensor) {
  return has_part(tensor) ? part_of(tensor).local() : tensor;
}

at::ScalarType compute_dtype(const at::Tensor& tensor, const MixedPrecision& precision) {
  return tensor.is_floating_point() ? precision.param_dtype.value_or(tensor.scalar_type())
                                    : tensor.scalar_type();
}

bool is_shm(const Group& group, c10::Device device) {
  return device.is_cpu() && group->getBackend(device.type())->getBackendName() == "shm";
}

}  // namespace

Unit::Unit(const std::vector<FoundParameter>& found, UnitSettings settings)
    : settings_(std::move(settings)),
      group_(settings_.group ? settings_.group : settings_.mesh.group(settings_.mesh.ndim() - 1)),
      copies_(settings_.mesh.ndim() == 2 ? settings_.mesh.group(0) : Group()) {
  if (found.empty()) return;
  const at::NoGradGuard no_grad;
  dtensor::ensure_registered();
  for (const auto& [tensor, name] : found) {
    names_.push_back(name);
    rows_.emplace_back(local_of(tensor).sizes(), group_->getSize(), settings_.is_split);
  }
  make_source(found);
  make_faces(found);
  std::vector<at::ScalarType> dtypes;
  for (const auto& whole : source_->wholes())
    dtypes.push_back(settings_.precision.reduce_dtype.value_or(whole.scalar_type()));
  reduction_ =
      std::make_unique<Reduction>(rows_, ReductionSettings{.group = group_,
                                                           .copies = copies_,
                                                           .is_split = settings_.is_split,
                                                           .number = settings_.number,
                                                           .unit = settings_.name,
                                                           .device = source_->shards()[0].device(),
                                                           .dtypes = std::move(dtypes)});
  is_hooked_.assign(parameters_.size(), false);
  gradients_.resize(parameters_.size());
  unreduced_.resize(parameters_.size());
  aside_.resize(parameters_.size());
}

Unit::~Unit() { forget_owner(parameters_); }

void Unit::make_source(const std::vector<FoundParameter>& found) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < found.size(); ++i) {
    auto value = local_of(found[i].tensor).detach();
    stats_.parameter_bytes += static_cast<int64_t>(value.nbytes());
    pieces.push_back({.value = value,
                      .rows = rows_[i],
                      .compute_dtype = compute_dtype(value, settings_.precision)});
  }
  const auto device = pieces[0].value.device();
  const bool is_alone = group_->getSize() == 1 || !settings_.is_split;
  if (is_alone || is_shm(group_, device)) {
    source_ =
        make_addressable_source(std::move(pieces), group_->getRank(),
                                "fully_shard: " + settings_.name, is_alone ? Group() : group_);
  } else {
    source_ = make_gathered_source(std::move(pieces), group_);
  }
  for (const auto& shard : source_->shards())
    stats_.shard_bytes += static_cast<int64_t>(shard.nbytes());
  stats_.gathered_bytes = static_cast<int64_t>(source_->private_bytes());
}

void Unit::make_faces(const std::vector<FoundParameter>& found) {
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& tensor = found[i].tensor;
    const auto strides = dtensor::dense_strides_like(tensor.sizes(), tensor.strides());
    const auto& whole = source_->wholes()[i];
    const auto inside = has_part(tensor)
                            ? dtensor::wrap(whole, part_of(tensor).spec, tensor.sizes(), strides)
                            : whole;
    auto outside = source_->shards()[i];
    if (settings_.is_split || has_part(tensor)) {
      const auto spec = outside_spec(tensor, found[i].name, settings_.mesh, settings_.is_split);
      outside = dtensor::wrap(outside, spec, tensor.sizes(), whole.strides());
    }
    parameters_.emplace_back(tensor, outside, inside);
  }
}

void Unit::attach() {
  for (auto& parameter : parameters_) {
    parameter.show_outside();
    if (!has_part(parameter.outside())) continue;
    part_of(parameter.outside()).before_write = [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      self->is_stale_ = true;
      self->source_->before_write();
    };
  }
  hook_gradients();
}

bool Unit::has_trainable() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const auto& one) { return one.parameter().requires_grad(); });
}

bool Unit::has_frozen() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const auto& one) { return !one.parameter().requires_grad(); });
}

void Unit::prefetch(Use use) {
  if (!works_in_background() || is_started_ || is_whole_ || (is_filled_ && !is_stale_)) return;
  source_->start(use);
  is_started_ = true;
}

void Unit::drop_prefetch() {
  if (!std::exchange(is_started_, false)) return;
  source_->finish();
  source_->free();
}

void Unit::gather(Use use) {
  const at::NoGradGuard no_grad;
  try {
    if (!is_started_) source_->start(use);
    is_started_ = false;
    source_->finish();
  } catch (c10::Error& error) {
    error.add_context("fully_shard: gathering the parameters of " + settings_.name);
    throw;
  }
  is_filled_ = true;
  is_stale_ = false;
  ++stats_.gathers;
}

void Unit::show_whole(Use use) {
  if (is_empty() || is_whole_) return;
  require_shards("fully_shard: forward, backward or unshard()");
  const bool is_ready = is_filled_ && !is_stale_;
  // Of plain parameters nobody tells that they were written.
  const bool may_be_old = source_->must_start() || !settings_.is_split;
  if (!is_ready || (use == Use::Forward && may_be_old)) gather(use);
  for (auto& parameter : parameters_) parameter.show_inside();
  is_whole_ = true;
}

void Unit::check_unwritten() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(!parameters_[i].was_written_inside(), "fully_shard: parameter '", names_[i],
                "' of ", settings_.name,
                " was written while it was whole, in forward or after unshard(); every rank writes "
                "its own shard: change parameters outside of forward");
  }
}

void Unit::show_shards(bool keeps_memory) {
  if (is_empty()) return;
  const bool was_whole = std::exchange(is_whole_, false);
  if (was_whole) {
    for (auto& parameter : parameters_) parameter.show_outside();
    source_->end_use();
  }
  if (!keeps_memory && std::exchange(is_filled_, false)) {
    source_->free();
    stats_.freed_bytes += stats_.gathered_bytes;
  }
  if (was_whole && settings_.is_split) check_unwritten();
}

FullyShardStats Unit::stats() const { return stats_; }

}  // namespace tessera::sharded
