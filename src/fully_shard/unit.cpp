#include "fully_shard/unit.h"

#include "base/capture.h"
#include "base/text.h"
#include "comm/backends.h"
#include "comm/call_check.h"
#include "dtensor/part.h"
#include "dtensor/registration.h"
#include "fully_shard/init.h"
#include "fully_shard/sharded_parameter.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace tessera::detail::fully_shard {
namespace {

using dtensor::has_part;
using dtensor::part_of;

at::ScalarType compute_dtype(const FoundParameter& found, const MixedPrecision& precision) {
  const auto own = found.tensor.scalar_type();
  const bool is_cast = found.tensor.is_floating_point() && !found.keeps_dtype;
  return is_cast ? precision.param_dtype.value_or(own) : own;
}

/// A count that rises with each.
int64_t writes_to(const std::vector<at::Tensor>& tensors) {
  int64_t writes = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.is_inference()) writes += tensor._version();
  }
  return writes;
}

std::string what_for(Use use, const std::string& unit) {
  return (use == Use::Forward ? "forward of " : "backward of ") + unit;
}

/// Adds to libtorch's words which unit wanted how much, and what may help.
void explain_memory(c10::OutOfMemoryError& error, const Source& source, const std::string& unit) {
  error.add_context(c10::str(
      "fully_shard: expected ", format_bytes(source.private_bytes()), " on ",
      source.unsharded()[0].device(), " for the gathered parameters of ", unit,
      "; use smaller units, forward_prefetch = false, a param_dtype of 16 bits, checkpoint() or "
      "smaller batches"));
}

void check_unexchanged(const Unit& unit) {
  const auto& parameters = unit.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i].parameter();
    TORCH_CHECK(!parameters[i].was_sharded_exchanged(), "fully_shard: expected parameter '",
                unit.names()[i], "' of ", unit.where, " as it was left, ",
                parameters[i].sharded().scalar_type(), ", but other memory of ",
                parameter.scalar_type(),
                " has been put there (Module::to, set_data), which would be lost; convert the "
                "module before fully_shard, write values in place or inside SummonFullParams, and "
                "compute in another dtype with mixed_precision");
  }
}

void check_unwritten(const Unit& unit) {
  const auto& parameters = unit.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(!parameters[i].was_unsharded_written(), "fully_shard: parameter '", unit.names()[i],
                "' of ", unit.settings().name,
                " was written while it was whole, in forward or after unshard(); every rank writes "
                "its own shard: change parameters outside of forward");
  }
}

}  // namespace

Unit::Unit(const std::vector<FoundParameter>& found, UnitSettings settings)
    : where(settings.name),
      settings_(std::move(settings)),
      group_(settings_.group ? settings_.group : settings_.mesh.group(settings_.mesh.ndim() - 1)),
      copies_(settings_.mesh.ndim() == 2 ? settings_.mesh.group(0) : Group()) {
  if (found.empty()) return;
  const at::NoGradGuard no_grad;
  dtensor::ensure_registered();
  for (const auto& one : found) {
    names_.push_back(one.name);
    rows_.emplace_back(dtensor::local_part(one.tensor).sizes(), group_->getSize(),
                       settings_.is_split, one.shard_dim);
  }
  make_source(found);
  make_parameters(found);
  std::vector<at::ScalarType> dtypes;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto dtype = source_->unsharded()[i].scalar_type();
    dtypes.push_back(found[i].keeps_dtype ? dtype
                                          : settings_.precision.reduce_dtype.value_or(dtype));
  }
  reduction_ =
      std::make_unique<EagerReduction>(ReductionSettings{.rows = rows_,
                                                         .group = group_,
                                                         .copies = copies_,
                                                         .is_split = settings_.is_split,
                                                         .number = settings_.number,
                                                         .unit = settings_.name,
                                                         .device = source_->unsharded()[0].device(),
                                                         .dtypes = std::move(dtypes)});
  const auto holds = [&](int64_t rank) {
    return std::any_of(rows_.begin(), rows_.end(),
                       [&](const ShardLayout& rows) { return rows.of(rank).length > 0; });
  };
  compares_updates_ = settings_.is_split;
  for (int64_t rank = 0; rank < group_->getSize(); ++rank)
    compares_updates_ = compares_updates_ && holds(rank);
  is_hooked_.assign(parameters_.size(), false);
  gradients_.resize(parameters_.size());
  aside_.resize(parameters_.size());
  has_arrived_.assign(parameters_.size(), false);
  has_own_.assign(parameters_.size(), false);
}

Unit::~Unit() { forget_owner(parameters_); }

void Unit::make_source(const std::vector<FoundParameter>& found) {
  std::vector<SourceParameter> pieces;
  for (size_t i = 0; i < found.size(); ++i) {
    auto value = dtensor::local_part(found[i].tensor).detach();
    stats_.parameter_bytes += static_cast<int64_t>(value.nbytes());
    pieces.push_back({.value = value,
                      .rows = rows_[i],
                      .compute_dtype = compute_dtype(found[i], settings_.precision),
                      .shard_dim = found[i].shard_dim});
  }
  const auto device = pieces[0].value.device();
  const bool is_alone = group_->getSize() == 1 || !settings_.is_split;
  // In shared memory a shard is a piece of the whole, which optimizers could not take as one.
  const bool lies_together = std::all_of(rows_.begin(), rows_.end(),
                                         [](const auto& rows) { return rows.lies_together(); });
  const bool is_addressable =
      is_alone || (comm::shares_memory(*group_, device.type()) && lies_together);
  if (is_addressable && !settings_.offloads) {
    source_ =
        make_addressable_source(std::move(pieces), group_->getRank(),
                                "fully_shard: " + settings_.name, is_alone ? Group() : group_);
  } else {
    source_ = make_gathered_source(pieces, {.group = is_alone ? Group() : group_,
                                            .neighbours = is_alone ? Group() : settings_.neighbours,
                                            .device = device,
                                            .on_cpu = settings_.offloads});
  }
  for (const auto& shard : source_->shards())
    stats_.shard_bytes += static_cast<int64_t>(shard.nbytes());
  stats_.gathered_bytes = static_cast<int64_t>(source_->private_bytes());
}

void Unit::make_parameters(const std::vector<FoundParameter>& found) {
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& tensor = found[i].tensor;
    const auto strides = dtensor::dense_strides_like(tensor.sizes(), tensor.strides());
    const auto& whole = source_->unsharded()[i];
    const auto unsharded = has_part(tensor)
                               ? dtensor::wrap(whole, part_of(tensor).spec, tensor.sizes(), strides)
                               : whole;
    auto sharded = source_->shards()[i];
    if (settings_.is_split || has_part(tensor)) {
      const auto spec =
          sharded_spec(tensor, found[i].name, settings_.mesh,
                       settings_.is_split ? std::optional(found[i].shard_dim) : std::nullopt);
      sharded = dtensor::wrap(sharded, spec, tensor.sizes(), whole.strides());
    }
    parameters_.emplace_back(tensor, sharded, unsharded);
  }
}

void Unit::attach() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    parameter.to_sharded();
    if (!has_part(parameter.sharded())) continue;
    part_of(parameter.sharded()).owner = std::make_shared<const dtensor::Owner>(
        dtensor::Owner{.name = c10::str("parameter '", names_[i], "' of ", settings_.name),
                       .before_write =
                           [weak = weak_from_this()] {
                             if (const auto self = weak.lock()) self->note_writing();
                           },
                       .before_expose =
                           [weak = weak_from_this()] {
                             if (const auto self = weak.lock()) self->expose_shards();
                           }});
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

void Unit::await_readers() {
  const comm::CallNote note("before a write to parameters of " + where);
  try {
    source_->before_write();
  } catch (c10::Error& error) {
    error.add_context(
        "fully_shard: before the parameters of " + where +
        " are written, or handed out, every rank comes to the end of its forwards and "
        "backwards of it");
    throw;
  }
}

void Unit::note_writing() {
  drop_prefetch();  // a forward that failed may have left one that reads the shard
  is_stale_ = true;
  await_readers();
  capture::tell([&](capture::Observer& observer) {
    observer.before_run(this, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->note_writing();
    });
  });
}

/// One rank alone may look at its shard, so that does not make values old: a write does.
void Unit::expose_shards() {
  await_readers();
  notice_writes();
  if (!seen_writes_) seen_writes_ = writes_to(source_->shards());
}

void Unit::notice_writes() {
  if (!seen_writes_) return;
  const auto writes = writes_to(source_->shards());
  if (std::exchange(seen_writes_, writes) != writes) is_stale_ = true;
}

void Unit::start(Use use) {
  is_updated_ = is_updated_ || is_stale_;
  is_stale_ = false;
  if (life_.values() == Values::Kept) life_.free();
  source().start(use);
  life_.begin_gather();
}

void Unit::prefetch(Use use) {
  const Timed timed(stats_.communication_seconds);
  if (life_.values() == Values::Gathering || is_unsharded() || !works_in_background()) return;
  notice_writes();
  if (life_.values() == Values::Kept && !is_stale_) return;
  const at::NoGradGuard no_grad;
  const comm::CallNote note(what_for(use, where));
  try {
    start(use);
  } catch (c10::OutOfMemoryError& error) {
    explain_memory(error, *source_, where);
    throw;
  }
}

void Unit::drop_prefetch() {
  if (life_.values() != Values::Gathering) return;
  life_.drop_gather();
  source_->finish();
  source_->free();
}

void Unit::gather(Use use) {
  const at::NoGradGuard no_grad;
  std::optional<comm::CallNote> note;
  if (!recorded_) note.emplace(what_for(use, where));  // a program's messages say nothing of it
  try {
    if (is_stale_) drop_prefetch();
    if (life_.values() != Values::Gathering) start(use);
    finish_gather();
  } catch (c10::OutOfMemoryError& error) {
    explain_memory(error, *source_, where);
    throw;
  } catch (c10::Error& error) {
    error.add_context("fully_shard: gathering the parameters of " + where +
                      "; every rank comes to each forward of it");
    throw;
  }
  ++stats_.gathers;
  if (!recorded_ && source_->works_in_background() && group_->getSize() > 1)
    stats_.communicated_bytes += static_cast<int64_t>(source_->private_bytes());
}

void Unit::finish_gather() {
  try {
    source().finish();
    // Nobody tells of writes to come to what the device still reads.
    if (settings_.offloads && (!settings_.is_split || seen_writes_)) source().before_write();
  } catch (...) {
    life_.drop_gather();
    throw;
  }
  life_.end_gather();
}

void Unit::unshard(Use use) {
  if (is_empty() || is_unsharded()) return;
  const Timed timed(stats_.communication_seconds);
  require_sharded("fully_shard: forward, backward or unshard()");
  check_unexchanged(*this);
  choose_source(use);
  notice_writes();
  // Of plain parameters nobody tells that they were written.
  const bool may_be_old = use == Use::Forward && !settings_.is_split;
  const bool is_old = life_.values() != Values::Kept || is_stale_ || may_be_old;
  if (source().must_start(use, is_old)) {
    const bool is_new = recorded_ && recorded_->unsharded().empty();
    gather(use);
    if (is_new) show_values_of(*recorded_);
  } else {
    source().reuse();
  }
  for (auto& parameter : parameters_) parameter.to_unsharded();
  life_.unshard();
}

void Unit::free() {
  if (life_.values() != Values::Kept || !source().free()) return;
  life_.free();
  stats_.freed_bytes += stats_.gathered_bytes;
}

void Unit::compute_in_full(bool full) {
  if (is_empty() || is_unsharded() || full == is_full_) return;
  end_recorded();
  drop_prefetch();
  free();
  is_full_ = full;
  source_->compute_in_full(full);
  stats_.gathered_bytes = static_cast<int64_t>(source_->private_bytes());
  show_values_of(*source_);
}

/// Unsharded forms are its values, or parts in tensor parallelism, from here on.
void Unit::show_values_of(const Source& source) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& whole = source.unsharded()[i];
    const auto before = parameters_[i].unsharded();
    parameters_[i].set_unsharded(has_part(before) ? dtensor::wrap(whole, part_of(before).spec,
                                                                  before.sizes(), before.strides())
                                                  : whole);
  }
}

/// Parameters are shards; whether they were not.
bool Unit::show_shards() {
  if (!is_unsharded()) return false;
  for (auto& parameter : parameters_) parameter.to_sharded();
  life_.reshard();
  source().end_use();
  return true;
}

void Unit::reshard(Keep keep, bool expects_backward) {
  if (is_empty()) return;
  const Timed timed(stats_.communication_seconds);
  const bool was_unsharded = show_shards();
  if (keep == Keep::Part && life_.values() == Values::Kept) source().keep_part();
  if (keep != Keep::All) free();
  if (was_unsharded && settings_.is_split) check_unwritten(*this);
  if (!expects_backward) end_recorded();
}

FullyShardStats Unit::stats() const {
  auto stats = stats_;
  stats.kept_bytes = source_ ? static_cast<int64_t>(source_->kept_bytes()) : 0;
  return stats;
}

}  // namespace tessera::detail::fully_shard
