// Reducing while a recorder writes the step down: by operators, nothing is sent ahead. Compiled,
// they are as early and as few as its passes make them.
#include "base/capture.h"
#include "comm/functional_ops.h"
#include "fully_shard/reduction.h"

#include <ATen/ATen.h>

#include <map>

namespace tessera::sharded {
namespace {

at::Tensor all_parts(const at::Tensor& whole, const Rows& rows) {
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

}  // namespace tessera::sharded
