// Note [recorded units]
// While a recorder watches, a unit is unsharded by operators on its shards, and
// its gradients are reduced by operators, for the recorder to see: RecordedSource and
// RecordedReduction take the place of the eager ones. Here it is decided which of them a use takes.
// In forward parameters show the unsharded values. In backward they are gathered once more
// and copied over the first, so that all that autograd saved of these, views included, means the
// new ones: in the recording values never change, so forward's are free when forward has ended.
// What is gathered is made of capture::again(shard), or it would be taken for the same.
#include "base/autograd.h"
#include "base/capture.h"
#include "comm/functional.h"
#include "fully_shard/reduction.h"
#include "fully_shard/source.h"
#include "fully_shard/unit.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <bit>
#include <map>

namespace tessera::detail::fully_shard {

// Reducing while a recorder writes the step down: by operators, nothing is sent ahead. Compiled,
// they are as early and as few as its passes make them.

namespace {

at::Tensor all_parts(const at::Tensor& whole, const ShardLayout& rows) {
  if (rows.is_even()) return whole.reshape({-1});
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < rows.ranks(); ++rank)
    parts.push_back(rows.padded(rows.part(whole, rank)));
  return at::cat(parts);
}

class RecordedReduction final : public Reduction {
 public:
  explicit RecordedReduction(const ReductionSettings& settings) : settings_(settings) {}

  void start(const std::vector<at::Tensor>& gradients, bool) override {
    // Not views to autograd: zero_grad detaches gradients, which views refuse.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool is_alone = settings_.is_alone();
    parts_.assign(gradients.size(), at::Tensor());
    const auto is_used = is_alone ? std::vector<bool>() : agree_on_used(gradients);
    std::map<at::ScalarType, std::vector<size_t>> kinds;  // a message has one dtype
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (settings_.is_member[i] && (is_alone ? gradients[i].defined() : is_used[i]))
        kinds[settings_.dtypes[i]].push_back(i);
    }
    for (const auto& [dtype, members] : kinds) {
      auto parts = reduce(members, gradients);
      for (size_t k = 0; k < members.size(); ++k) parts_[members[k]] = std::move(parts[k]);
    }
  }

  std::vector<at::Tensor> finish() override { return std::exchange(parts_, {}); }

 private:
  /// Which gradients any rank has, told in a message that is no part of the recording: a program
  /// does the same at every run.
  std::vector<bool> agree_on_used(const std::vector<at::Tensor>& gradients) const {
    const capture::HiddenMessage hidden;
    std::vector<at::Tensor> extra{settings_.make_extra(gradients).to(settings_.device)};
    c10d::AllreduceOptions options;
    options.reduceOp = settings_.operation();
    options.asyncOp = false;
    for (const auto& group : {settings_.group, settings_.copies}) {
      if (!group || group->getSize() == 1) continue;
      const auto work = group->getBackend(settings_.device.type())->allreduce(extra, options);
      if (work) work->wait();
    }
    const auto told = extra[0].cpu();
    const auto* values = told.const_data_ptr<float>();
    if (!settings_.copies) settings_.check_number({values, values + told.numel()});
    std::vector<bool> is_used;
    for (auto i = told.numel() - std::ssize(gradients); i < told.numel(); ++i)
      is_used.push_back(values[i] > 0);
    return is_used;
  }

  /// Of gradients of one dtype.
  std::vector<at::Tensor> reduce(const std::vector<size_t>& members,
                                 const std::vector<at::Tensor>& gradients) const {
    const auto dtype = settings_.dtypes[members[0]];
    const auto op = settings_.factor ? ReduceOp::SUM : ReduceOp::AVG;
    std::vector<at::Tensor> tensors;
    for (const size_t i : members)
      tensors.push_back(gradients[i].defined()
                            ? gradients[i].to(dtype)
                            : at::zeros(settings_.rows[i].sizes(),
                                        at::TensorOptions(dtype).device(settings_.device)));
    const auto all_reduce = [&](const Group& group) {
      for (auto& tensor : tensors) tensor = tensor.contiguous();
      tensors = comm::functional::wait(comm::functional::all_reduce(tensors, op, group));
    };
    if (settings_.ranks() > 1 && settings_.is_split) {
      tensors = scatter(members, tensors, op);
    } else {
      if (settings_.ranks() > 1) all_reduce(settings_.group);
      if (settings_.copies) all_reduce(settings_.copies);
    }
    if (settings_.factor) {
      for (auto& tensor : tensors) tensor = tensor / *settings_.factor;
    }
    return tensors;
  }

  std::vector<at::Tensor> scatter(const std::vector<size_t>& members,
                                  const std::vector<at::Tensor>& tensors,
                                  ReduceOp::RedOpType op) const {
    const Group& group = settings_.group;
    const Group& copies = settings_.copies;
    std::vector<at::Tensor> sent;
    for (size_t k = 0; k < members.size(); ++k)
      sent.push_back(all_parts(tensors[k], settings_.rows[members[k]]));
    auto parts = comm::functional::wait(comm::functional::reduce_scatter(sent, op, group));
    // As they are, equally long on all ranks: these send the same messages then.
    if (copies) parts = comm::functional::wait(comm::functional::all_reduce(parts, op, copies));
    for (size_t k = 0; k < members.size(); ++k) {
      const auto sizes = settings_.rows[members[k]].part_sizes(group->getRank());
      parts[k] = parts[k].narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
    }
    return parts;
  }

  const ReductionSettings& settings_;
  std::vector<at::Tensor> parts_;
};

}  // namespace

std::unique_ptr<Reduction> make_recorded_reduction(const ReductionSettings& settings) {
  return std::make_unique<RecordedReduction>(settings);
}

// Unsharded values while a recorder writes the step down: by operators that it sees.

namespace {

at::Tensor joined(const at::Tensor& gathered, const ShardLayout& rows) {
  if (rows.is_even()) return gathered.view(rows.sizes());
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < rows.ranks(); ++rank) {
    const auto sizes = rows.part_sizes(rank);
    const auto numel = c10::multiply_integers(sizes);
    if (numel > 0)
      parts.push_back(gathered.narrow(0, rank * rows.largest_numel(), numel).view(sizes));
  }
  return at::cat(parts, rows.tensor_dim());
}

class RecordedSource final : public Source {
 public:
  RecordedSource(const Source& eager, std::vector<ShardLayout> rows, Group group)
      : rows_(std::move(rows)), group_(std::move(group)) {
    shards_ = eager.shards();
    for (const auto& whole : eager.unsharded()) dtypes_.push_back(whole.scalar_type());
  }

  /// Forward gathers anew each time. Backward does unless forward's values were to be kept, or
  /// nobody records it: then they are there.
  bool must_start(Use use, bool) const override {
    return use == Use::Forward || (!is_kept_ && capture::observer() != nullptr);
  }

  void start(Use) override {
    is_kept_ = true;
    auto gathered = gather();
    if (unsharded_.empty()) {
      unsharded_ = std::move(gathered);
      return;
    }
    for (size_t i = 0; i < unsharded_.size(); ++i) {
      if (rows_[i].is_split()) unsharded_[i].copy_(gathered[i]);
    }
  }
  void finish() override {}

  /// A recorder knows memory by the tensor that showed it first, which must not be a parameter:
  /// that shows something else later.
  void reuse() override {
    for (const auto& whole : unsharded_) at::alias(whole);
  }

  bool free() override {
    is_kept_ = false;
    return false;
  }
  void compute_in_full(bool) override {}  // a recording has one set of dtypes
  size_t private_bytes() const override { return 0; }

 private:
  std::vector<at::Tensor> gather() const {
    auto shards = shards_;
    if (is_in_backward() || !unsharded_.empty()) {
      for (auto& shard : shards) shard = capture::again(shard);
    }
    std::vector<at::Tensor> values(shards.size());
    std::map<at::ScalarType, std::vector<size_t>> kinds;  // a message has one dtype
    for (size_t i = 0; i < shards.size(); ++i) {
      const bool travels = rows_[i].is_split() && group_->getSize() > 1 && rows_[i].numel() > 0;
      if (travels)
        kinds[dtypes_[i]].push_back(i);
      else  // an operator in any case, or a recorder would know the memory as the parameter
        values[i] =
            shards[i].scalar_type() == dtypes_[i] ? at::alias(shards[i]) : shards[i].to(dtypes_[i]);
    }
    for (const auto& [dtype, members] : kinds) {
      std::vector<at::Tensor> sent;
      for (const size_t i : members) sent.push_back(rows_[i].padded(shards[i].to(dtype)));
      const auto received = comm::functional::wait(comm::functional::all_gather(sent, group_));
      for (size_t k = 0; k < members.size(); ++k)
        values[members[k]] = joined(received[k], rows_[members[k]]);
    }
    return values;
  }

  std::vector<ShardLayout> rows_;
  Group group_;
  std::vector<at::ScalarType> dtypes_;
  bool is_kept_ = false;  // what forward gathered serves backward, too
};

}  // namespace

std::unique_ptr<Source> make_recorded_source(const Source& eager, std::vector<ShardLayout> rows,
                                             const Group& group) {
  return std::make_unique<RecordedSource>(eager, std::move(rows), group);
}

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

}  // namespace tessera::detail::fully_shard
