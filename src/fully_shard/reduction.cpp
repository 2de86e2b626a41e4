#include "fully_shard/reduction.h"

#include "base/devices.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstring>

namespace tessera::detail::fully_shard {
namespace {

// Every row ends with the number of the unit, bit by bit, and one flag per parameter that says
// whether the sender has a gradient for it. Reduced like all else, they tell whether the ranks
// reduced the same unit, and which parameters got a gradient on any rank, without a message of
// their own. Sums of ones are what a low dtype still holds; those of whole numbers are rounded.
constexpr int64_t kNumberBits = 8;

}  // namespace

EagerReduction::EagerReduction(ReductionSettings settings) : settings_(std::move(settings)) {
  settings_.is_member.assign(settings_.rows.size(), false);
}

void EagerReduction::set_members(std::vector<bool> is_member) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      held_.empty(), "fully_shard: expected the parameters of ", settings_.unit,
      " to be frozen or thawed after their gradients were averaged over the copies, but some are "
      "kept for that since set_requires_all_reduce(module, false); finish that step first");
  settings_.is_member = std::move(is_member);
  packings_ = pack(settings_.rows, settings_.dtypes, settings_.is_split ? settings_.ranks() : 1,
                   settings_.device,
                   /*extra=*/kNumberBits + static_cast<int64_t>(settings_.rows.size()),
                   settings_.is_member);
}

c10d::ReduceOp ReductionSettings::operation() const {
  return factor ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
}

at::Tensor ReductionSettings::make_extra(const std::vector<at::Tensor>& gradients) const {
  auto extra = at::empty({kNumberBits + static_cast<int64_t>(gradients.size())}, at::kFloat);
  auto* values = extra.mutable_data_ptr<float>();
  for (int64_t bit = 0; bit < kNumberBits; ++bit) *values++ = static_cast<float>(number >> bit & 1);
  for (const auto& gradient : gradients) *values++ = gradient.defined() ? 1 : 0;
  return extra;
}

void ReductionSettings::check_number(const std::vector<float>& extra) const {
  bool is_same = true;
  for (int64_t bit = 0; bit < kNumberBits; ++bit) {
    const auto got = extra[static_cast<size_t>(bit)] / static_cast<float>(factor ? ranks() : 1);
    const auto own = static_cast<float>(number >> bit & 1);
    is_same = is_same && std::abs(got - own) < 0.25F;
  }
  TORCH_CHECK(is_same, "fully_shard: expected all ranks to reduce the gradients of ", unit,
              " at this point of backward, but some reduced those of another unit; parameters must "
              "be used alike on all ranks");
}

/// On the device: a copy of the host's memory would wait for it.
at::Tensor EagerReduction::extra_for(const std::vector<at::Tensor>& gradients) {
  if (settings_.device.is_cpu()) return settings_.make_extra(gradients);
  std::vector<bool> has_gradient;
  for (const auto& gradient : gradients) has_gradient.push_back(gradient.defined());
  if (!extra_.defined() || has_gradient != extra_tells_) {
    extra_ = settings_.make_extra(gradients).to(settings_.device);
    extra_tells_ = std::move(has_gradient);
  }
  return extra_;
}

/// Many small copies: on the CPU without the dispatcher, which would cost more than they do.
void EagerReduction::pack_member(const Packing& packing, size_t position,
                                 const at::Tensor& gradient, const at::Tensor& rows) const {
  const auto& of = settings_.rows[packing.packed()[position]];
  const bool is_plain = of.lies_together() && gradient.is_cpu() &&
                        gradient.scalar_type() == packing.dtype() && gradient.is_contiguous();
  for (int64_t rank = 0; rank < packing.ranks(); ++rank) {
    if (!is_plain) {
      packing.slot(rows.select(0, rank), position, rank).copy_(of.part(gradient, rank));
      continue;
    }
    const auto chunk = of.of(rank);
    if (chunk.length == 0) continue;
    const auto size = static_cast<int64_t>(gradient.element_size());
    const auto to = rank * packing.row_numel() + packing.offset(position);
    std::memcpy(
        static_cast<char*>(rows.mutable_data_ptr()) + to * size,
        static_cast<const char*>(gradient.const_data_ptr()) + chunk.offset * of.row_numel() * size,
        static_cast<size_t>(chunk.length * of.row_numel() * size));
  }
}

/// The same where a copy is a kernel: all of them in few.
void EagerReduction::pack_together(const Packing& packing, const std::vector<at::Tensor>& gradients,
                                   const at::Tensor& rows) const {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (size_t i = 0; i < packing.packed().size(); ++i) {
    const auto member = packing.packed()[i];
    if (!gradients[member].defined()) continue;
    for (int64_t rank = 0; rank < packing.ranks(); ++rank) {
      auto part = settings_.rows[member].part(gradients[member], rank);
      if (part.numel() == 0) continue;
      to.push_back(packing.slot(rows.select(0, rank), i, rank));
      from.push_back(std::move(part));
    }
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
}

at::Tensor EagerReduction::pack_rows(const Packing& packing,
                                     const std::vector<at::Tensor>& gradients) {
  auto rows = at::zeros({packing.ranks(), packing.row_numel()},
                        at::TensorOptions(packing.dtype()).device(settings_.device));
  if (settings_.device.is_cpu()) {
    for (size_t i = 0; i < packing.packed().size(); ++i) {
      const auto& gradient = gradients[packing.packed()[i]];
      if (gradient.defined()) pack_member(packing, i, gradient, rows);
    }
  } else {
    pack_together(packing, gradients, rows);
  }
  if (packing.has_extra()) {
    const auto all =
        rows.narrow(1, packing.row_numel() - packing.extra_numel(), packing.extra_numel());
    all.copy_(extra_for(gradients));
  }
  return rows.view({-1});
}

EagerReduction::Message EagerReduction::make_message(const Packing& packing,
                                                     const std::vector<at::Tensor>& gradients) {
  const auto options = at::TensorOptions(packing.dtype()).device(settings_.device);
  Message message{
      .packing = &packing, .sent = {}, .received = {}, .alone_sent = {}, .alone_received = {}};
  for (const size_t member : packing.alone()) {
    const auto& gradient = gradients[member];
    message.alone_sent.push_back(gradient.defined()
                                     ? gradient.to(packing.dtype()).contiguous()
                                     : at::zeros(settings_.rows[member].sizes(), options));
    message.alone_received.push_back(
        settings_.is_split
            ? at::empty(settings_.rows[member].part_sizes(settings_.group->getRank()), options)
            : message.alone_sent.back());
  }
  if (!packing.has_rows()) return message;
  message.sent = pack_rows(packing, gradients);
  message.received = settings_.is_split ? at::empty({packing.row_numel()}, options) : message.sent;
  return message;
}

void EagerReduction::start(const std::vector<at::Tensor>& gradients, bool in_background) {
  const at::NoGradGuard no_grad;
  if (settings_.is_alone()) {
    own_ = gradients;
    return;
  }
  messages_.clear();
  is_complete_ = true;
  for (size_t i = 0; i < gradients.size(); ++i)
    is_complete_ = is_complete_ && (gradients[i].defined() || !settings_.is_member[i]);
  for (const auto& packing : packings_) messages_.push_back(make_message(packing, gradients));
  launch(in_background);
}

void EagerReduction::launch(bool in_background) {
  const auto backend = settings_.group->getBackend(settings_.device.type());
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (const auto& message : messages_) {
    inputs.insert(inputs.end(), message.alone_sent.begin(), message.alone_sent.end());
    outputs.insert(outputs.end(), message.alone_received.begin(), message.alone_received.end());
    if (!message.sent.defined()) continue;
    inputs.push_back(message.sent);
    outputs.push_back(message.received);
  }
  if (settings_.is_split) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = settings_.operation();
    options.asyncOp = in_background;
    work_ = backend->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  } else {
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = settings_.operation();
    options.asyncOp = in_background;
    work_ = backend->allreduce_coalesced(outputs, options);
  }
  if (in_background) return;
  if (work_) work_->wait();
  work_.reset();
}

std::vector<at::Tensor> EagerReduction::received() const {
  std::vector<at::Tensor> tensors;
  for (const auto& message : messages_) {
    tensors.insert(tensors.end(), message.alone_received.begin(), message.alone_received.end());
    if (message.received.defined()) tensors.push_back(message.received);
  }
  return tensors;
}

void EagerReduction::hold() {
  const auto tensors = received();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto dtype = tensors[i].scalar_type();
    if (i < held_.size()) {
      held_[i].add_(tensors[i]);
    } else {
      held_.push_back(tensors[i].to(c10::isReducedFloatingType(dtype) ? at::kFloat : dtype));
    }
  }
}

/// Rounded once.
void EagerReduction::add_held() {
  const auto tensors = received();
  for (size_t i = 0; i < held_.size(); ++i) tensors[i].copy_(held_[i].add_(tensors[i]));
  held_.clear();
}

void EagerReduction::reduce_copies() {
  auto tensors = received();
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = settings_.operation();
  options.asyncOp = false;
  const auto work =
      settings_.copies->getBackend(settings_.device.type())->allreduce_coalesced(tensors, options);
  if (work) work->wait();
}

std::vector<float> EagerReduction::read_extra() const {
  const auto& message = messages_.front();
  const auto extra = message.packing->extra(message.received).to(at::kFloat).cpu();
  const auto* values = extra.const_data_ptr<float>();
  return {values, values + extra.numel()};
}

/// What the host would wait for if it read it at once is read in a later reduction, when it is
/// there: ranks that reduced different units are told then.
void EagerReduction::check_number_later() {
  if (checked_later_.defined()) {
    if (!copied_->query()) return;
    const auto extra = std::exchange(checked_later_, at::Tensor());
    const auto* values = extra.const_data_ptr<float>();
    settings_.check_number({values, values + extra.numel()});
  }
  const auto& message = messages_.front();
  const auto extra = message.packing->extra(message.received).to(at::kFloat);
  checked_later_ = at::empty(extra.sizes(), at::TensorOptions(at::kFloat).pinned_memory(true));
  checked_later_.copy_(extra, /*non_blocking=*/true);
  copied_.emplace(settings_.device.type());
  copied_->record(current_stream(settings_.device));
}

std::vector<at::Tensor> EagerReduction::results() const {
  // Not views to autograd: zero_grad detaches gradients, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> parts(settings_.rows.size());
  const auto rank = settings_.is_split ? settings_.group->getRank() : 0;
  for (const auto& message : messages_) {
    const auto& packing = *message.packing;
    for (size_t i = 0; i < packing.alone().size(); ++i)
      parts[packing.alone()[i]] = message.alone_received[i];
    for (size_t i = 0; i < packing.packed().size(); ++i)
      parts[packing.packed()[i]] = packing.slot(message.received, i, rank);
  }
  return parts;
}

std::vector<at::Tensor> EagerReduction::finish() {
  const at::NoGradGuard no_grad;
  if (settings_.is_alone()) {
    auto own = std::exchange(own_, {});
    for (auto& gradient : own) {
      if (gradient.defined() && settings_.factor) gradient = gradient / *settings_.factor;
    }
    return own;
  }
  if (work_) work_->wait();
  work_.reset();
  // Own gradients for all of them say that all are used.
  const bool asks = settings_.device.is_cpu() || !is_complete_;
  std::vector<float> extra;
  if (asks)
    settings_.check_number(extra = read_extra());
  else
    check_number_later();
  if (settings_.copies && !reduces_copies_) {
    hold();
    messages_.clear();
    return std::vector<at::Tensor>(settings_.rows.size());
  }
  if (!held_.empty()) add_held();
  if (settings_.copies) {
    reduce_copies();
    if (asks) extra = read_extra();
  }
  auto parts = results();
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_used =
        asks ? extra[static_cast<size_t>(kNumberBits) + i] > 0 : parts[i].defined();
    if (!is_used) parts[i] = at::Tensor();
    if (is_used && settings_.factor) parts[i].div_(*settings_.factor);
  }
  messages_.clear();
  return parts;
}

}  // namespace tessera::detail::fully_shard
