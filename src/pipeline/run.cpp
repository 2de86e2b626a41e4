#include "pipeline/run.h"

#include <tessera/dtensor.h>
#include <tessera/trace.h>

#include "base/devices.h"
#include "nn/composable.h"
#include "replicate/state_impl.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

namespace tessera::detail::pipeline {
namespace {

using Kind = PipelineAction::Kind;

constexpr double kMillisecond = 1e-3;

bool brings_gradients(const PipelineAction& action) {
  return action.kind == Kind::Backward || action.kind == Kind::BackwardInput;
}

std::vector<at::Tensor> cut(const at::Tensor& batch, int count, c10::Device device) {
  std::vector<at::Tensor> parts;
  for (auto& part : batch.tensor_split(count, 0)) parts.push_back(part.to(device));
  return parts;
}

}  // namespace

void BusyClock::begin() {
  if (device_.is_cpu()) {
    times_.emplace_back(Clock::now(), Clock::time_point());
    return;
  }
  constexpr auto kTimed = c10::EventFlag::BACKEND_DEFAULT;
  events_.emplace_back(c10::Event(device_.type(), kTimed), c10::Event(device_.type(), kTimed));
  events_.back().first.record(current_stream(device_));
}

void BusyClock::end() {
  if (device_.is_cpu())
    times_.back().second = Clock::now();
  else
    events_.back().second.record(current_stream(device_));
}

PipelineStats BusyClock::stats() const {
  PipelineStats stats;
  for (const auto& [begin, end] : times_)
    stats.busy_seconds += std::chrono::duration<double>(end - begin).count();
  if (!times_.empty()) {
    const auto all = times_.back().second - times_.front().first;
    stats.seconds = std::chrono::duration<double>(all).count();
  }
  if (events_.empty()) return stats;
  events_.back().second.synchronize();
  for (const auto& [begin, end] : events_)
    stats.busy_seconds += begin.elapsedTime(end) * kMillisecond;
  stats.seconds = events_.front().first.elapsedTime(events_.back().second) * kMillisecond;
  return stats;
}

StageSync::StageSync(torch::nn::Module& stage) {
  for (const auto& module : stage.modules()) {
    const auto replicated =
        std::dynamic_pointer_cast<replicate::State>(nn::find_state(*module, "replicate"));
    can_split_ = can_split_ && !nn::find_state(*module, "fully_shard") &&
                 !nn::find_state(*module, "checkpoint") &&
                 !(replicated && replicated->searches_unused());
    TORCH_CHECK_NOT_IMPLEMENTED(
        !replicated || !replicated->lowers_precision(),
        "pipeline: expected stages replicated without mixed_precision, which raises parameters "
        "after each backward, while other microbatches need them lowered; use Autocast in forward");
  }
  for (auto& state : nn::find_all_states<nn::SyncsGradients>(stage)) {
    if (!state->syncs_gradients()) continue;  // NoSync around the step
    state->set_syncs_gradients(false);
    before_.push_back(std::move(state));
  }
}

StageSync::~StageSync() {
  for (const auto& state : before_) state->set_syncs_gradients(true);
}

void StageSync::begin_last(const at::Tensor& output) {
  for (const auto& state : before_) {
    if (const auto replicated = std::dynamic_pointer_cast<replicate::State>(state))
      replicated->begin_backward({output});
    else
      state->set_syncs_gradients(true);
  }
}

Run::Run(RunSettings settings, RunKind kind, const at::Tensor& inputs, const at::Tensor& targets)
    : settings_(std::move(settings)), kind_(kind), clock_(settings_.device) {
  const auto& table = settings_.table;
  if (table.stage_ranks.front() == settings_.rank)
    inputs_ = cut(inputs, table.microbatches, settings_.device);
  if (kind == RunKind::Forward || table.stage_ranks.back() != settings_.rank) return;
  targets_ = cut(targets, table.microbatches, settings_.device);
  rows_ = targets.size(0);
}

size_t Run::local_index(int stage) const {
  const auto& owners = settings_.table.stage_ranks;
  return static_cast<size_t>(std::count(owners.begin(), owners.begin() + stage, settings_.rank));
}

void Run::run(const std::vector<PipelineAction>& actions) {
  const c10::AutoGradMode grad_mode(kind_ == RunKind::Train);
  if (kind_ == RunKind::Train) {
    for (auto& stage : settings_.stages) syncs_.push_back(std::make_unique<StageSync>(*stage));
    gradients_left_.assign(syncs_.size(), settings_.table.microbatches);
  }
  for (size_t i = 0; i < actions.size(); ++i) {
    try {
      expect(actions[i]);
      if (i + 1 < actions.size()) expect(actions[i + 1]);
      act(actions[i]);
    } catch (c10::Error& error) {
      error.add_context(c10::str("pipeline: in ", actions[i], " (stage ", actions[i].stage,
                                 ", microbatch ", actions[i].microbatch, ") on rank ",
                                 settings_.rank));
      throw;
    }
  }
  syncs_.clear();
  settings_.messages.end();
}

std::optional<MessageKey> Run::needed_by(const PipelineAction& action) const {
  if (action.kind == Kind::Forward && action.stage > 0)
    return MessageKey{false, action.stage, action.microbatch};
  if (brings_gradients(action) && !is_last(action.stage))
    return MessageKey{true, action.stage, action.microbatch};
  return std::nullopt;
}

void Run::expect(const PipelineAction& action) {
  if (const auto key = needed_by(action)) settings_.messages.expect(*key);
}

void Run::act(const PipelineAction& action) {
  if (action.kind == Kind::Forward) return forward(action.stage, action.microbatch);
  const Span span(SpanKind::Backward, "pipeline backward");
  if (action.kind != Kind::BackwardWeight) return backward(action);
  const auto found = flights_.find({action.stage, action.microbatch});
  if (found == flights_.end()) return;
  clock_.begin();
  begin_gradients(action.stage, {});
  found->second.weights.backward_weight();
  clock_.end();
  flights_.erase(found);
}

void Run::begin_gradients(int stage, const at::Tensor& output) {
  const auto index = local_index(stage);
  if (--gradients_left_[index] == 0) syncs_[index]->begin_last(output);
}

at::Tensor Run::take_input(int stage, int microbatch) {
  if (stage == 0) return inputs_[static_cast<size_t>(microbatch)];
  const MessageKey key{false, stage, microbatch};
  auto input = settings_.messages.receive(key);
  if (settings_.messages.form(key).requires_grad) input.requires_grad_();
  return input;
}

double Run::weight_of(int microbatch) const {
  if (settings_.options.loss_reduction == PipelineReduction::Sum) return 1;
  const auto& target = targets_[static_cast<size_t>(microbatch)];
  return static_cast<double>(target.size(0)) / static_cast<double>(rows_);
}

void Run::finish_last_stage(const at::Tensor& output, int microbatch, Flight& flight) {
  if (kind_ == RunKind::Forward) {
    outputs_.resize(static_cast<size_t>(settings_.table.microbatches));
    outputs_[static_cast<size_t>(microbatch)] = output;
    return;
  }
  auto loss = settings_.options.loss_fn(output, targets_[static_cast<size_t>(microbatch)]);
  TORCH_CHECK_VALUE(
      loss.defined() && loss.numel() == 1 && !is_dtensor(loss),
      "pipeline: expected loss_fn to return one plain number, got ",
      loss.defined() ? c10::str("a tensor of shape ", loss.sizes()) : "an undefined tensor",
      "; reduce it by mean or sum, and say which in loss_reduction");
  if (const double weight = weight_of(microbatch); weight != 1) loss = loss * weight;
  const auto value = loss.detach().reshape({});
  loss_ = loss_.defined() ? loss_ + value : value;
  flight.output = std::move(loss);
}

void Run::forward(int stage, int microbatch) {
  const Span span(SpanKind::Forward, "pipeline forward");
  Flight flight;
  flight.input = take_input(stage, microbatch);
  clock_.begin();
  auto output = settings_.stages[local_index(stage)]->forward(flight.input);
  TORCH_CHECK_VALUE(output.defined() && !is_dtensor(output), "pipeline: expected stage ", stage,
                    " to return a plain tensor, got ",
                    output.defined() ? "a distributed one; let its last module gather its output, "
                                       "e.g. by RowwiseParallel"
                                     : "an undefined one");
  if (is_last(stage))
    finish_last_stage(output, microbatch, flight);
  else
    flight.output = output;
  clock_.end();
  if (!is_last(stage)) {
    const bool requires_grad = output.requires_grad();
    settings_.messages.send({false, stage + 1, microbatch}, output.detach(), requires_grad);
  }
  if (kind_ == RunKind::Train) flights_[{stage, microbatch}] = std::move(flight);
}

at::Tensor Run::incoming_gradient(int stage, int microbatch, const at::Tensor& output) {
  if (is_last(stage)) return at::ones_like(output);
  return settings_.messages.receive({true, stage, microbatch});
}

void Run::backward(const PipelineAction& action) {
  const auto [stage, kind, microbatch] = action;
  auto& flight = flights_.at({stage, microbatch});
  const bool has_next = stage > 0 && flight.input.requires_grad();
  const bool is_split =
      kind == Kind::BackwardInput && has_next && syncs_[local_index(stage)]->can_split();
  at::Tensor gradient;
  if (flight.output.requires_grad()) {
    const auto incoming = incoming_gradient(stage, microbatch, flight.output);
    clock_.begin();
    if (is_split) {
      gradient = flight.weights.backward_input(flight.output, incoming, flight.input);
    } else {
      begin_gradients(stage, flight.output);
      torch::autograd::backward({flight.output}, {incoming});
      gradient = flight.input.grad();
    }
    clock_.end();
  }
  if (has_next) {
    if (!gradient.defined()) gradient = at::zeros_like(flight.input);
    settings_.messages.send({true, stage - 1, microbatch}, gradient.detach(), false);
  }
  if (is_split) {
    flight.input = at::Tensor();
    flight.output = at::Tensor();
  } else {
    flights_.erase({stage, microbatch});
  }
}

at::Tensor Run::output() const { return outputs_.empty() ? at::Tensor() : at::cat(outputs_, 0); }

}  // namespace tessera::detail::pipeline
