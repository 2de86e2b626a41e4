#include "train/step.h"

#include <tessera/autocast.h>
#include <tessera/comm.h>
#include <tessera/replicate.h>
#include <tessera/trace.h>

#include "train/parallelize.h"
#include "train/random_state.h"
#include "train/schedule.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/isfinite.h>
#include <torch/utils.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace tessera::train {
namespace {

AutocastOptions autocast_of(const Settings& settings) {
  return {.dtype = settings.precision == "fp16" ? at::kHalf : at::kBFloat16,
          .enabled = settings.precision != "fp32"};
}

/// `part`: of all parts of a batch but the last; empty if there is one part.
std::map<std::string, std::string> files_of(std::string code, std::string graph, std::string part) {
  std::map<std::string, std::string> files = {{"program.cpp", std::move(code)}};
  if (!graph.empty()) files["program.txt"] = std::move(graph);
  if (!part.empty()) files["program-part.txt"] = std::move(part);
  return files;
}

}  // namespace

TrainStep::TrainStep(Model model, optim::Optimizer& optimizer, const Settings& settings,
                     bool has_data_ranks)
    : model_(std::move(model)),
      optimizer_(optimizer),
      settings_(settings),
      is_replicated_(has_data_ranks && settings.parallel == "replicate"),
      choice_(choose_compile(settings, world_size())),
      scaler_({.device = device_type_of(settings),
               .enabled = settings.precision == "fp16",
               .group = default_group()}) {
  part_ = [this](at::Tensor tokens, at::Tensor targets, at::Tensor positions, at::Tensor weight,
                 at::Tensor scale) { return run_part(tokens, targets, positions, weight, scale); };
  last_ = [this](at::Tensor tokens, at::Tensor targets, at::Tensor positions, at::Tensor weight,
                 at::Tensor scale, at::Tensor sum) {
    return finish(run_part(tokens, targets, positions, weight, scale), sum);
  };
  program_files_ = [] { return std::map<std::string, std::string>(); };
  explanation_ = [] { return std::string(); };
  if (!choice_.is_on) return;
  auto part = compile(part_, {.module = model_->module()});
  part_ = part;
  // The host looks at numbers, which a program can't.
  if (scaler_.is_enabled() || !decides_on_device(settings)) {
    last_ = [this](at::Tensor tokens, at::Tensor targets, at::Tensor positions, at::Tensor weight,
                   at::Tensor scale, at::Tensor sum) {
      return finish(part_(tokens, targets, positions, weight, scale), sum);
    };
    program_files_ = [part] { return files_of(generated_code(part), program_graph(part), ""); };
    explanation_ = [part] { return explain(part); };
    return;
  }
  auto last = compile(last_, {.module = model_->module(), .optimizer = optimizer});
  last_ = last;
  program_files_ = [part, last] {
    return files_of(generated_code(part) + "\n" + generated_code(last), program_graph(last),
                    program_graph(part));
  };
  explanation_ = [part, last] { return explain(part) + explain(last); };
}

at::Tensor TrainStep::run_part(const at::Tensor& tokens, const at::Tensor& targets,
                               const at::Tensor& positions, const at::Tensor& weight,
                               const at::Tensor& scale) {
  if (auto* pipeline = model_->pipeline()) return pipeline->step(tokens, targets) * weight;
  at::Tensor loss;
  {
    const Span span(SpanKind::Forward, "forward");
    const Autocast autocast(device_type_of(settings_), autocast_of(settings_));
    loss = model_->loss(tokens, targets, positions);
  }
  const Span span(SpanKind::Backward, "backward");
  (loss * scale).backward();
  return loss.detach() * weight;
}

StepValues TrainStep::run(const std::function<Batch()>& next_part) {
  at::Tensor sum;
  for (int64_t i = 0; i < settings_.accumulate; ++i) {
    const bool is_last = i + 1 == settings_.accumulate;
    std::optional<Batch> batch;
    {
      const Span span(SpanKind::Data, "data");
      batch = next_part();
    }
    // Shards add up as they are; unsharded gradients need not travel before the last part.
    std::optional<NoSync> no_sync;
    if (is_replicated_ && !is_last) no_sync.emplace(model_->module());
    const Span span(SpanKind::Other, choice_.is_on ? "program" : "part");
    const auto weight = [&] {
      return at::full({}, batch->weight, at::TensorOptions(device_type_of(settings_)));
    };
    const auto scale = scaler_.scale(weight());
    if (is_last) {
      const auto values =
          last_(batch->tokens, batch->targets, batch->positions, weight(), scale, sum);
      return {.all = values[0], .found_inf = values[1]};
    }
    const auto loss = part_(batch->tokens, batch->targets, batch->positions, weight(), scale);
    sum = sum.defined() ? sum + loss : loss;
  }
  TORCH_INTERNAL_ASSERT(false, "a step without parts");
}

std::vector<at::Tensor> TrainStep::finish(const at::Tensor& loss, const at::Tensor& sum) {
  const auto total = sum.defined() ? sum + loss : loss;
  const auto values = values_of_all(total, clip(), may_overflow());
  update(values.found_inf);
  return {values.all, values.found_inf};
}

at::Tensor TrainStep::clip() {
  const Span span(SpanKind::Optimizer, "clip");
  if (scaler_.is_enabled()) scaler_.unscale_(optimizer_);
  if (auto* pipeline = model_->pipeline())
    return pipeline->clip_grad_norm_(settings_.clip > 0 ? settings_.clip
                                                        : std::numeric_limits<double>::infinity());
  const auto parameters = model_->module()->parameters();
  if (settings_.clip > 0) return optim::clip_grad_norm_(parameters, settings_.clip);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  return optim::get_total_norm(gradients);
}

void TrainStep::update(const at::Tensor& found_inf) {
  const Span span(SpanKind::Optimizer, "update");
  scaler_.step(optimizer_, found_inf);
  scaler_.update();
  optimizer_.zero_grad();
}

at::Tensor TrainStep::evaluate(const Batch& batch) {
  const torch::NoGradGuard no_grad;
  const Autocast autocast(device_type_of(settings_), autocast_of(settings_));
  return model_->loss(batch.tokens, batch.targets, batch.positions);
}

std::map<std::string, std::string> TrainStep::program_files() const { return program_files_(); }

std::string TrainStep::new_fallback() {
  if (!choice_.is_on || has_told_fallback_) return "";
  // The explanation is a text to be made: it is asked for at calls 1, 2, 4, 8 …
  if (!std::has_single_bit(++asked_)) return "";
  constexpr std::string_view kSaid = "runs eagerly: ";  // how a line of explain() begins
  std::istringstream lines(explanation_());
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(kSaid)) continue;
    has_told_fallback_ = true;
    return "falls back to eager, since " + line.substr(kSaid.size());
  }
  return "";
}

void choose_attention(const Settings& settings) {
  using at::SDPBackend;
  const bool is_default = settings.attention == "auto" && settings.precision == "fp32";
  if (settings.device == "cpu" || is_default) return;
  const auto first = settings.attention == "flash"  ? SDPBackend::flash_attention
                     : settings.attention == "math" ? SDPBackend::math
                                                    : SDPBackend::cudnn_attention;
  std::vector<int64_t> order;
  for (const auto backend : at::globalContext().sDPPriorityOrder())
    order.push_back(static_cast<int64_t>(backend));
  std::ranges::stable_partition(
      order, [&](int64_t backend) { return backend == static_cast<int64_t>(first); });
  at::globalContext().setSDPPriorityOrder(order);
}

namespace {

/// What modules write down in forward is as before after its scope.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& model) : buffers_(model.buffers()) {
    for (const auto& buffer : buffers_) kept_.push_back(buffer.clone());
  }
  ~KeptBuffers() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(kept_[i]);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<at::Tensor> buffers_, kept_;
};

}  // namespace

std::optional<std::string> find_nonfinite(const LanguageModel& model, TrainStep& step,
                                          const std::vector<Batch>& batches) {
  const auto root = model.module();
  const KeptRandomState random(root->parameters().front().device());
  const KeptBuffers buffers(*root);
  std::string first;
  std::vector<HookHandle> handles;
  for (const auto& module : root->named_modules()) {
    if (!is_hookable(*module.value())) continue;
    const auto name = module.key().empty() ? "the model" : module.key();
    handles.push_back(register_forward_hook(
        *module.value(), [&first, name](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
          if (!first.empty()) return;
          for (const auto& output : result.tensors()) {
            if (!at::isfinite(output).all().item<bool>()) first = name;
          }
        }));
  }
  for (const auto& batch : batches) {
    const auto loss = step.evaluate(batch);
    if (first.empty() && !at::isfinite(loss).item<bool>()) first = "the loss";
  }
  for (auto& handle : handles) handle.remove();

  const auto all = gather_bytes(first);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return all[rank] + " on rank " + std::to_string(rank);
  }
  return std::nullopt;
}

}  // namespace tessera::train
