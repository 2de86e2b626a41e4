// Note [recorded units]
// While a recorder watches, a unit is unsharded by operators on its shards, and
// its gradients are reduced by operators, for the recorder to see: RecordedSource and
// RecordedReduction take the place of the eager ones. Here it is decided which of them a use takes.
// In forward parameters show the unsharded values. In backward they are gathered once more
// and copied over the first, so that all that autograd saved of these, views included, means the
// new ones: in the recording values never change, so forward's are free when forward has ended.
// What is gathered is made of capture::again(shard), or it would be taken for the same.
#include "base/capture.h"
#include "fully_shard/unit.h"

#include <c10/util/StringUtil.h>

#include <bit>

namespace tessera::sharded {

namespace {

/// Empty if it can be. `is_again`: it has been recorded before in this recording.
std::string why_not_recorded(Unit& unit, const capture::Observer& observer, bool is_again) {
  if (unit.settings().offloads) return "its parameters are offloaded";
  if (unit.settings().neighbours) return "a part of it is kept after forward";
  // In a recording that has all of the step they are values like others.
  if (!unit.requires_sync() && !observer.watches_modules())
    return "its gradients are added up without being reduced";
  const auto& reduction = *unit.reduction();
  if ((unit.has_unreduced() && !is_again) || reduction.has_held() || !reduction.reduces_copies())
    return "gradients of several batches are reduced together";
  return "";
}

/// A number that changes with what users set of it; not 0.
uint64_t way_of_reduction(Unit& unit) {
  uint64_t way = unit.requires_sync() ? 2 : 1;
  auto* reduction = unit.reduction();
  if (reduction == nullptr) return way;
  way = 4 * way + (reduction->reduces_copies() ? 2 : 0) + (unit.has_unreduced() ? 1 : 0);
  return way ^ (std::bit_cast<uint64_t>(reduction->divisor().value_or(0)) << 3U);
}

void note_reduction(Unit& unit) {
  capture::tell([&](capture::Observer& observer) {
    observer.depend_on(&unit, "whether, and how, gradients of " + unit.where + " are reduced",
                       [weak = unit.weak_from_this()]() -> uint64_t {
                         const auto self = weak.lock();
                         return self ? way_of_reduction(*self) : 0;
                       });
  });
}

}  // namespace

bool Unit::works_in_background() const {
  return source_ && source_->works_in_background() && capture::observer() == nullptr;
}

/// For a use that begins.
void Unit::choose_source(Use use) {
  auto* observer = capture::observer();
  if (use == Use::Backward) {  // as its forward
    if (observer != nullptr && !recorded_)
      observer->give_up("the forward of " + where + ", which is fully sharded, was not recorded");
    return;
  }
  // A second call before backward: both use the same unsharded values, whose gradients autograd
  // adds up.
  const bool is_again = observer != nullptr && recording_ == observer->number;
  if (!is_again) end_recorded();
  if (observer == nullptr) return;
  recording_ = observer->number;
  note_reduction(*this);
  const auto why_not =
      observer->takes_averages() ? why_not_recorded(*this, *observer, is_again) : "of optimize_ddp";
  if (!why_not.empty()) {
    end_recorded();
    return observer->give_up(c10::str("fully_shard gathers ", where,
                                      " by itself, which operators do not show, since ", why_not));
  }
  if (recorded_) return;
  drop_prefetch();
  free();
  recorded_ = make_recorded_source(*source_, rows_, group_);
}

Reduction& Unit::choose_reduction() {
  auto* observer = capture::observer();
  if (observer == nullptr) return *reduction_;
  if (!recorded_) {
    observer->give_up("fully_shard reduces gradients of " + where + " by itself");
    return *reduction_;
  }
  recorded_reduction_ = make_recorded_reduction(reduction_->settings());
  return *recorded_reduction_;
}

/// No backward comes for what a recorded forward unsharded.
void Unit::end_recorded() {
  if (!recorded_) return;
  recorded_.reset();
  if (life_.values() == Values::Kept) life_.free();
  show_values_of(*source_);
}

/// Gradients of this batch wait for those of a later one, which must come in the same recording.
void Unit::note_unreduced() {
  capture::tell([&](capture::Observer& observer) {
    observer.at_end(this, [weak = weak_from_this()]() -> std::string {
      const auto self = weak.lock();
      if (!self || !self->has_unreduced()) return "";
      return "gradients of " + self->where +
             ", which is fully sharded, are added up without being reduced, and wait for a later "
             "call; reduce them in the same one: leave its last backward out of the NoSync scope, "
             "or shard with accumulate_sharded = true";
    });
  });
}

void Unit::set_requires_sync(bool required) {
  note_reduction(*this);  // as it was when the step began: a scope inside of it is part of it
  requires_sync_ = required;
}

}  // namespace tessera::sharded
