// Unsharded values while a recorder writes the step down: by operators that it sees.
#include "base/capture.h"
#include "base/open_backwards.h"
#include "comm/functional_ops.h"
#include "fully_shard/source.h"

#include <ATen/ATen.h>

#include <map>

namespace tessera::sharded {
namespace {

at::Tensor joined(const at::Tensor& gathered, const Rows& rows) {
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
  RecordedSource(const Source& eager, std::vector<Rows> rows, Group group)
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

  std::vector<Rows> rows_;
  Group group_;
  std::vector<at::ScalarType> dtypes_;
  bool is_kept_ = false;  // what forward gathered serves backward, too
};

}  // namespace

std::unique_ptr<Source> make_recorded_source(const Source& eager, std::vector<Rows> rows,
                                             const Group& group) {
  return std::make_unique<RecordedSource>(eager, std::move(rows), group);
}

}  // namespace tessera::sharded
