// Reducing while a recorder writes the step down.
#include "base/capture.h"
#include "comm/functional_ops.h"
#include "fully_shard/by_operators.h"
#include "fully_shard/reduction.h"

#include <ATen/ATen.h>

namespace tessera::sharded {

/// Which gradients any rank has, told in a message that is no part of the recording: a program does
/// the same at every run.
std::vector<bool> Reduction::agree_on_used(const std::vector<at::Tensor>& gradients) const {
  const capture::HiddenMessage hidden;
  std::vector<at::Tensor> extra{make_extra(gradients).to(settings_.device)};
  c10d::AllreduceOptions options;
  options.reduceOp = operation();
  options.asyncOp = false;
  for (const auto& group : {settings_.group, settings_.copies}) {
    if (!group || group->getSize() == 1) continue;
    const auto work = group->getBackend(settings_.device.type())->allreduce(extra, options);
    if (work) work->wait();
  }
  const auto told = extra[0].cpu();
  const auto* values = told.const_data_ptr<float>();
  if (!settings_.copies) check_number({values, values + told.numel()});
  std::vector<bool> is_used;
  for (auto i = told.numel() - std::ssize(gradients); i < told.numel(); ++i)
    is_used.push_back(values[i] > 0);
  return is_used;
}

std::vector<at::Tensor> Reduction::reduce_by_operators(
    const std::vector<size_t>& members, const std::vector<at::Tensor>& gradients) const {
  const auto dtype = settings_.dtypes[members[0]];
  const auto op = factor_ ? ReduceOp::SUM : ReduceOp::AVG;
  std::vector<at::Tensor> tensors;
  std::vector<Rows> rows;
  for (const size_t i : members) {
    rows.push_back(rows_[i]);
    tensors.push_back(
        gradients[i].defined()
            ? gradients[i].to(dtype)
            : at::zeros(rows_[i].sizes(), at::TensorOptions(dtype).device(settings_.device)));
  }
  const auto all_reduce = [&](const Group& group) {
    for (auto& tensor : tensors) tensor = tensor.contiguous();
    tensors = comm::functional::wait(comm::functional::all_reduce(tensors, op, group));
  };
  if (ranks_ > 1 && settings_.is_split) {
    tensors = scatter_by_operators(tensors, rows, op, settings_.group, settings_.copies);
  } else {
    if (ranks_ > 1) all_reduce(settings_.group);
    if (settings_.copies) all_reduce(settings_.copies);
  }
  if (factor_) {
    for (auto& tensor : tensors) tensor = tensor / *factor_;
  }
  return tensors;
}

void Reduction::start_by_operators(const std::vector<at::Tensor>& gradients) {
  // Not views to autograd: zero_grad detaches gradients, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  by_operators_.assign(rows_.size(), at::Tensor());
  const auto is_used = is_alone() ? std::vector<bool>() : agree_on_used(gradients);
  std::map<at::ScalarType, std::vector<size_t>> kinds;  // a message has one dtype
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (is_member_[i] && (is_alone() ? gradients[i].defined() : is_used[i]))
      kinds[settings_.dtypes[i]].push_back(i);
  }
  for (const auto& [dtype, members] : kinds) {
    auto parts = reduce_by_operators(members, gradients);
    for (size_t k = 0; k < members.size(); ++k) by_operators_[members[k]] = std::move(parts[k]);
  }
}

}  // namespace tessera::sharded
