#include "train/step.h"

#include <tessera/autocast.h>
#include <tessera/replicate.h>
#include <tessera/trace.h>

#include "train/parallelize.h"

#include <torch/utils.h>

#include <optional>

namespace tessera::train {
namespace {

AutocastOptions autocast_of(const Settings& settings) {
  return {.dtype = settings.precision == "fp16" ? at::kHalf : at::kBFloat16,
          .enabled = settings.precision != "fp32"};
}

}  // namespace

TrainStep::TrainStep(Gpt model, optim::AdamW& optimizer, const Settings& settings,
                     bool has_data_ranks)
    : model_(std::move(model)),
      optimizer_(optimizer),
      settings_(settings),
      is_replicated_(has_data_ranks && settings.parallel == "replicate"),
      scaler_({.device = device_type_of(settings),
               .enabled = settings.precision == "fp16",
               .group = default_group()}) {
  part_ = [this](at::Tensor tokens, at::Tensor targets, at::Tensor scale) {
    return run_part(tokens, targets, scale);
  };
  program_ = [] { return std::string(); };
  if (!settings.compile) return;
  auto part = compile(part_, {.module = model_});
  auto update = compile(
      [this] {
        optimizer_.step();
        optimizer_.zero_grad();
      },
      {.module = model_, .optimizer = optimizer});
  part_ = part;
  program_ = [part, update] { return generated_code(part) + "\n" + generated_code(update); };
  // The scaler looks at numbers, which a program can't.
  if (!scaler_.is_enabled()) program_update_ = update;
}

at::Tensor TrainStep::run_part(const at::Tensor& tokens, const at::Tensor& targets,
                               const at::Tensor& scale) {
  at::Tensor loss;
  {
    const Span span(SpanKind::Forward, "forward");
    const Autocast autocast(device_type_of(settings_), autocast_of(settings_));
    loss = next_token_loss(model_(tokens), targets);
  }
  const Span span(SpanKind::Backward, "backward");
  (loss * scale).backward();
  return loss.detach();
}

at::Tensor TrainStep::backward(const std::function<Batch()>& next_part) {
  at::Tensor sum;
  const auto one = at::full({}, 1.0 / static_cast<double>(settings_.accumulate),
                            at::TensorOptions(device_type_of(settings_)));
  for (int64_t i = 0; i < settings_.accumulate; ++i) {
    std::optional<Batch> batch;
    {
      const Span span(SpanKind::Data, "data");
      batch = next_part();
    }
    // Shards add up as they are; whole gradients need not travel before the last part.
    std::optional<NoSync> no_sync;
    if (is_replicated_ && i + 1 < settings_.accumulate) no_sync.emplace(model_);
    const Span span(SpanKind::Other, settings_.compile ? "program" : "part");
    const auto loss = part_(batch->tokens, batch->targets, scaler_.scale(one));
    sum = sum.defined() ? sum + loss : loss;
  }
  return sum / static_cast<double>(settings_.accumulate);
}

at::Tensor TrainStep::clip() {
  const Span span(SpanKind::Optimizer, "clip");
  if (scaler_.is_enabled()) scaler_.unscale_(optimizer_);
  const auto parameters = model_->parameters();
  if (settings_.clip > 0) return optim::clip_grad_norm_(parameters, settings_.clip);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  return optim::get_total_norm(gradients);
}

void TrainStep::update(const at::Tensor& found_inf) {
  const Span span(SpanKind::Optimizer, "update");
  if (scaler_.is_enabled()) {
    scaler_.step(optimizer_, found_inf);
    scaler_.update();
  } else if (!program_update_) {
    optimizer_.step_unless(found_inf);
  } else if (found_inf.item<float>() == 0) {  // a program is run or not
    return program_update_();
  }
  optimizer_.zero_grad();
}

at::Tensor TrainStep::evaluate(const Batch& batch) {
  const torch::NoGradGuard no_grad;
  const Autocast autocast(device_type_of(settings_), autocast_of(settings_));
  return next_token_loss(model_(batch.tokens), batch.targets);
}

std::string TrainStep::program() const { return program_(); }

}  // namespace tessera::train
