// Note [recorded units]
// While a recorder watches, a unit's parameters are made whole by operators from its shards, and
// its gradients are reduced by operators, for the recorder to see; sources, with their memory and
// gates, are left alone. In forward the whole values become another inner face. In backward they
// are gathered once more and copied over the first, so that all that autograd saved of these, views
// included, means the new ones: in the recording values never change, so forward's are free when
// forward has ended. What is gathered is made of capture::again(shard), or it would be taken for
// the same.
#include "base/capture.h"
#include "base/open_backwards.h"
#include "fully_shard/by_operators.h"
#include "fully_shard/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <c10/util/StringUtil.h>

#include <bit>

namespace tessera::sharded {

namespace {

/// Empty if it can be. `is_again`: it has been recorded before in this recording.
std::string why_not_recorded(Unit& unit, const capture::Observer& observer, bool is_again) {
  if (unit.settings().offloads) return "its parameters are offloaded";
  if (unit.settings().neighbours) return "a part of it is kept after forward";
  // In a recording that has all of the step they are values like others.
  if (!unit.requires_sync && !observer.watches_modules())
    return "its gradients are added up without being reduced";
  const auto& reduction = *unit.reduction();
  if ((unit.has_unreduced() && !is_again) || reduction.has_held() || !reduction.reduces_copies())
    return "gradients of several batches are reduced together";
  return "";
}

/// A number that changes with what users set of it; not 0.
uint64_t way_of_reduction(Unit& unit) {
  uint64_t way = unit.requires_sync ? 2 : 1;
  auto* reduction = unit.reduction();
  if (reduction == nullptr) return way;
  way = 2 * way + (reduction->reduces_copies() ? 1 : 0);
  return way ^ (std::bit_cast<uint64_t>(reduction->divisor().value_or(0)) << 3U);
}

}  // namespace

void Unit::note_reduction() {
  auto* observer = capture::observer();
  if (observer == nullptr) return;
  observer->depend_on(this, "whether, and how, gradients of " + where + " are reduced",
                      [weak = weak_from_this()]() -> uint64_t {
                        const auto self = weak.lock();
                        return self ? way_of_reduction(*self) : 0;
                      });
}

/// Whether a recorder watches, so that this use goes by operators.
bool Unit::begin_recorded(Use use) {
  auto* observer = capture::observer();
  if (use == Use::Forward) {
    // A second call before backward: both have one inner face, whose gradients autograd adds up.
    const bool is_again = observer != nullptr && recording_ == observer->number;
    if (!is_again) end_recorded();
    if (observer == nullptr) return false;
    recording_ = observer->number;
    note_reduction();
    const auto why_not = observer->takes_averages() ? why_not_recorded(*this, *observer, is_again)
                                                    : "of optimize_ddp";
    if (!why_not.empty()) {
      observer->give_up(c10::str("fully_shard gathers ", where,
                                 " by itself, which operators do not show, since ", why_not));
      return false;
    }
    gather_recorded();
  } else if (recorded_.empty()) {
    if (observer != nullptr)
      observer->give_up("the forward of " + where + ", which is fully sharded, was not recorded");
    return false;
  } else if (observer != nullptr && !is_recorded_kept_) {
    gather_recorded();
  } else if (observer != nullptr) {
    // A recorder knows memory by the tensor that showed it first, which must not be a parameter:
    // that shows something else later.
    for (const auto& whole : recorded_) at::alias(whole);
  }
  for (auto& parameter : parameters_) parameter.show_inside();
  is_whole_ = true;
  return true;
}

void Unit::gather_recorded() {
  const at::NoGradGuard no_grad;
  auto shards = source_->shards();
  std::vector<at::ScalarType> dtypes;
  for (size_t i = 0; i < shards.size(); ++i) {
    dtypes.push_back(source_->wholes()[i].scalar_type());
    if (is_in_backward() || !recorded_.empty()) shards[i] = capture::again(shards[i]);
  }
  auto wholes = gather_by_operators(shards, rows_, dtypes, group_);
  ++stats_.gathers;
  if (recorded_.empty()) {
    recorded_ = std::move(wholes);
    for (size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i].set_inside(inside_of(i, recorded_[i]));
    return;
  }
  for (size_t i = 0; i < wholes.size(); ++i) {
    if (rows_[i].is_split()) recorded_[i].copy_(wholes[i]);
  }
}

void Unit::end_recorded() {
  if (recorded_.empty()) return;
  recorded_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].set_inside(inside_of(i, source_->wholes()[i]));
}

}  // namespace tessera::sharded
