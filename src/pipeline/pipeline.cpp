#include <tessera/dtensor.h>
#include <tessera/optim.h>
#include <tessera/pipeline.h>

#include "nn/composable.h"
#include "pipeline/messages.h"
#include "pipeline/run.h"
#include "pipeline/stages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace tessera {

using detail::pipeline::BusyClock;
using detail::pipeline::Messages;
using detail::pipeline::Run;
using detail::pipeline::RunKind;

namespace {

constexpr const char* kName = "pipeline";

Group group_of(const PipelineOptions& options) {
  TORCH_CHECK_VALUE(!options.group || !options.mesh,
                    "pipeline: expected a group or a mesh, got both; leave one out");
  TORCH_CHECK_VALUE(
      !options.mesh || options.mesh->ndim() == 1, "pipeline: expected a 1-D mesh, got a ",
      options.mesh ? options.mesh->ndim() : 0, "-D one; slice it first, e.g. mesh[\"pp\"]");
  if (options.mesh) return options.mesh->group();
  return options.group ? options.group : default_group();
}

PipelineTable table_of(const PipelineOptions& options, int ranks) {
  if (!options.table) {
    TORCH_CHECK_VALUE(options.n_microbatches >= 1,
                      "pipeline: expected n_microbatches of at least 1, got ",
                      options.n_microbatches, "; some multiple of the ", ranks, " ranks is usual");
    return make_pipeline_table(options.schedule, ranks, options.n_microbatches,
                               options.stages_per_rank);
  }
  const auto& table = *options.table;
  verify_pipeline_table(table);
  TORCH_CHECK_VALUE(static_cast<int>(table.actions.size()) == ranks,
                    "pipeline: expected a table for the group's ", ranks, " ranks, got one for ",
                    table.actions.size());
  TORCH_CHECK_VALUE(options.n_microbatches == 0 || options.n_microbatches == table.microbatches,
                    "pipeline: expected n_microbatches as in the table, ", table.microbatches,
                    ", got ", options.n_microbatches, "; leave it out");
  return table;
}

std::vector<std::vector<PipelineAction>> forwards_of(const PipelineTable& table) {
  auto actions = table.actions;
  for (auto& of_rank : actions) {
    std::erase_if(of_rank, [](const PipelineAction& action) {
      return action.kind != PipelineAction::Kind::Forward;
    });
  }
  return actions;
}

void check_batch(const char* function, const char* what, const at::Tensor& batch,
                 int microbatches) {
  TORCH_CHECK_VALUE(
      batch.defined() && batch.dim() >= 1 && batch.size(0) >= microbatches, "pipeline: expected ",
      what, " of ", function, " with at least ", microbatches, " rows, one per microbatch, got ",
      batch.defined() ? c10::str("a tensor of shape ", batch.sizes()) : "an undefined tensor",
      "; pass the whole batch, or fewer n_microbatches");
}

}  // namespace

/// That the net is cut, for functions that would be applied to it.
class PipelineState final : public nn::ComposableState {};

class Pipeline::Impl {
 public:
  Impl(torch::nn::SequentialImpl& net, PipelineOptions options)
      : options_(std::move(options)),
        group_(group_of(options_)),
        rank_(tessera::rank(group_)),
        table_(table_of(options_, world_size(group_))),
        forwards_(forwards_of(table_)),
        device_(c10::kCPU) {
    const auto borders = detail::pipeline::find_borders(net, options_, table_.stage_ranks.size());
    detail::pipeline::check_agreement(net, borders, table_, options_, group_);
    stages_ = detail::pipeline::take_stages(net, borders, table_, options_, group_);
    messages_.emplace(group_, table_);
    const auto parameters = net.parameters();
    if (!parameters.empty() && !parameters[0].is_meta()) device_ = parameters[0].device();
  }

  at::Tensor loss(RunKind kind, const at::Tensor& inputs, const at::Tensor& targets) {
    TORCH_CHECK_VALUE(options_.loss_fn,
                      "pipeline: expected loss_fn in the options, got none; pass "
                      "one, or call forward(inputs)");
    const auto* function = kind == RunKind::Train ? "step" : "eval";
    if (has_last()) check_batch(function, "targets", targets, table_.microbatches);
    if (has_first() && has_last())
      TORCH_CHECK_VALUE(inputs.defined() && inputs.dim() > 0 && inputs.size(0) == targets.size(0),
                        "pipeline: expected as many rows of targets as of inputs, got ",
                        targets.size(0), " and ",
                        inputs.defined() ? c10::str(inputs.sizes()) : "an undefined tensor");
    auto run = start(function, kind, inputs, targets);
    return share_loss(run.loss());
  }

  at::Tensor output(const at::Tensor& inputs) {
    return start("forward", RunKind::Forward, inputs, {}).output();
  }

  void reset_shapes() { messages_->forget_forms(); }
  const std::vector<nn::Sequential>& stages() const { return stages_; }
  const PipelineTable& table() const { return table_; }
  PipelineStats stats() const { return clock_.stats(); }
  at::Tensor clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);

 private:
  bool has_first() const { return table_.stage_ranks.front() == rank_; }
  bool has_last() const { return table_.stage_ranks.back() == rank_; }

  /// Where this rank's parameters are.
  c10::Device find_device() const {
    for (const auto& stage : stages_) {
      for (const auto& item : stage->named_parameters()) {
        TORCH_CHECK_VALUE(!item.value().is_meta(),
                          "pipeline: expected parameters with memory, but '", item.key(),
                          "' is on the meta device; pass device, which gives memory to "
                          "this rank's stages, or give them to fully_shard, before the first step");
        return item.value().device();
      }
    }
    return options_.device.value_or(device_);
  }

  Run start(const char* function, RunKind kind, const at::Tensor& inputs,
            const at::Tensor& targets) {
    TORCH_CHECK(!has_failed_,
                "pipeline: an earlier step failed on this rank, and messages of it "
                "may still be on their way; shutdown() and init() again, or end the rank and "
                "start the job anew");
    if (has_first()) check_batch(function, "inputs", inputs, table_.microbatches);
    const auto device = find_device();
    const bool trains = kind == RunKind::Train;
    const auto& actions = trains ? table_.actions : forwards_;
    messages_->begin(actions, device, trains);
    Run run({.table = table_,
             .options = options_,
             .stages = stages_,
             .messages = *messages_,
             .rank = rank_,
             .device = device},
            kind, inputs, targets);
    has_failed_ = true;
    run.run(actions[static_cast<size_t>(rank_)]);
    has_failed_ = false;
    clock_ = run.take_clock();
    return run;
  }

  /// From the rank that has it. Its dtype is told with it, and read once: on a GPU that waits.
  at::Tensor share_loss(const at::Tensor& own) {
    if (world_size(group_) == 1) return own;
    const auto options = at::TensorOptions(find_device()).dtype(at::kDouble);
    auto told = at::empty({2}, options);
    if (own.defined()) {
      told[0].copy_(own);
      told[1].fill_(static_cast<double>(own.scalar_type()));
    }
    const auto all = broadcast(told, table_.stage_ranks.back(), group_);
    if (own.defined()) return own;
    if (!loss_dtype_) loss_dtype_ = static_cast<at::ScalarType>(all[1].item<double>());
    return all[0].to(*loss_dtype_);
  }

  PipelineOptions options_;
  Group group_;
  int rank_;
  PipelineTable table_;
  std::vector<std::vector<PipelineAction>> forwards_;  // of the table, alone
  c10::Device device_;                                 // of the net
  std::vector<nn::Sequential> stages_;
  std::optional<Messages> messages_;
  std::optional<at::ScalarType> loss_dtype_;
  BusyClock clock_;
  bool has_failed_ = false;
};

at::Tensor Pipeline::Impl::clip_grad_norm(double max_norm, double norm_type,
                                          bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(norm_type > 0, "Pipeline::clip_grad_norm_: expected a norm_type above 0, got ",
                    norm_type, "; 2 is usual, infinity takes the largest element");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& stage : stages_) {
    for (const auto& parameter : stage->parameters()) {
      const auto& gradient = parameter.grad();
      const auto is_same = [&](const auto& one) { return one.is_same(gradient); };
      if (gradient.defined() && std::none_of(gradients.begin(), gradients.end(), is_same))
        gradients.push_back(gradient);
    }
  }
  const auto own = optim::get_total_norm(gradients, norm_type).to(find_device(), at::kDouble);
  const bool is_largest = std::isinf(norm_type);
  auto total = is_largest
                   ? all_reduce(own, ReduceOp::MAX, group_)
                   : all_reduce(own.pow(norm_type), ReduceOp::SUM, group_).pow(1 / norm_type);
  if (!gradients.empty()) total = total.to(gradients[0].scalar_type());
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total.item<double>()),
              "clip_grad_norm_: expected a finite total norm of order ", norm_type, ", got ",
              total.item<double>(),
              ": some gradient is not finite; skip the step, or pass "
              "error_if_nonfinite = false to scale by it anyway");
  const auto factor = total.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  for (const auto& gradient : gradients) gradient.mul_(factor.to(gradient.scalar_type()));
  return total;
}

at::Tensor Pipeline::step(const at::Tensor& inputs, const at::Tensor& targets) {
  return impl_->loss(RunKind::Train, inputs, targets);
}
at::Tensor Pipeline::eval(const at::Tensor& inputs, const at::Tensor& targets) {
  return impl_->loss(RunKind::Evaluate, inputs, targets);
}
at::Tensor Pipeline::forward(const at::Tensor& inputs) { return impl_->output(inputs); }
void Pipeline::reset_shapes() { impl_->reset_shapes(); }
const std::vector<nn::Sequential>& Pipeline::stages() const { return impl_->stages(); }
const PipelineTable& Pipeline::table() const { return impl_->table(); }
PipelineStats Pipeline::stats() const { return impl_->stats(); }
at::Tensor Pipeline::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  return impl_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
}

Pipeline detail::make_pipeline(torch::nn::Module& net, PipelineOptions options) {
  auto* chain = dynamic_cast<torch::nn::SequentialImpl*>(&net);
  TORCH_CHECK_VALUE(chain != nullptr, "pipeline: expected a Sequential, got ", nn::name_of(net),
                    "; put its parts into one in the order of the forward: "
                    "nn::Sequential(net->embed, …, net->head) shares them with the net");
  std::shared_ptr<Pipeline::Impl> impl;
  nn::apply_composable(net, {.function = kName, .excludes = {"replicate", "fully_shard"}}, [&] {
    impl = std::make_shared<Pipeline::Impl>(*chain, std::move(options));
    return std::make_shared<PipelineState>();
  });
  return Pipeline(std::move(impl));
}

}  // namespace tessera
