// Styles: those that distribute parameters, and those that only place what comes and goes.
#include <tessera/nn/hooks.h>
#include <tessera/parallel/prepare.h>
#include <tessera/parallel/styles.h>

#include "base/text.h"
#include "dtensor/sharding.h"
#include "nn/composable.h"
#include "parallel/boundary.h"
#include "parallel/parameters.h"

#include <c10/util/Exception.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>

namespace tessera {
namespace parallel {
namespace {

constexpr const char* kFunction = "parallelize_module";

class StyleState final : public nn::ComposableState {
 public:
  explicit StyleState(std::string style) : style(std::move(style)) {}
  const std::string style;
};

/// Runs `distribute`, which puts the module's parameters on the mesh, once per module.
void distribute_once(const StyleTarget& target, const char* style,
                     const std::function<void()>& distribute) {
  require_hookable(target, style);
  if (const auto state = nn::find_state(target.module, kFunction)) {
    const auto applied = std::dynamic_pointer_cast<StyleState>(state);
    TORCH_CHECK_VALUE(false, "parallelize_module: expected ", describe(target),
                      " to be parallelized once, but ", applied ? applied->style : "a style",
                      " is applied to it already and ", style,
                      " came; name it in one entry of one plan");
  }
  TORCH_CHECK_VALUE(!nn::find_state(target.module, "lora"), "parallelize_module: expected ",
                    describe(target),
                    " without adapters, which are placed as its weight is; call "
                    "parallelize_module first, then lora");
  nn::apply_composable(target.module,
                       {.function = kFunction, .excludes = {"distribute_module", "fully_shard"}},
                       [&] {
                         distribute();
                         return std::make_shared<StyleState>(style);
                       });
}

/// What a style wants to happen around forward.
struct ForwardPlacements {
  Reporter reporter;
  DeviceMesh mesh;
  Placement input = {};    // of plain inputs
  Placement desired = {};  // of the input, when forward runs
  Placement output = {};
  bool use_local_output = true;
  GlobalSizes whole = {};  // of plain inputs
};

void place_around_forward(torch::nn::Module& module, ForwardPlacements wanted) {
  const auto shared = std::make_shared<const ForwardPlacements>(std::move(wanted));
  register_forward_pre_hook(module, [shared](torch::nn::Module&, nn::Arguments& arguments) {
    auto& tensor = first_tensor(arguments, shared->reporter);
    tensor = placed_at(
        as_distributed(tensor, shared->mesh, shared->input, shared->reporter, shared->whole),
        shared->desired);
  });
  register_forward_hook(module, [shared](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
    auto& tensor = only_tensor(result, shared->reporter);
    const auto placed = placed_at(DTensor::of(tensor), shared->output,
                                  /*async_op=*/!shared->use_local_output);
    tensor = shared->use_local_output ? placed.to_local() : at::Tensor(placed);
  });
}

[[noreturn]] void refuse_module(const StyleTarget& target, const char* style) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "parallelize_module: ", style, " expected a Linear or an Embedding, got ",
      describe(target),
      "; correct the plan, or write a style of your own (ParallelStyle) for this module");
}

void check_embedding(const StyleTarget& target, const char* style,
                     const torch::nn::EmbeddingImpl& embedding) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !embedding.options.max_norm() && !embedding.options.sparse(), "parallelize_module: ", style,
      " expected ", describe(target),
      " to have neither max_norm nor sparse gradients, which sharded weights can't have");
}

/// A rank's columns of the input of a Linear that takes `features` of them.
GlobalSizes columns_of(int64_t features, const DeviceMesh& mesh, const Reporter& reporter) {
  return [features, mesh, reporter](const at::Tensor& local) {
    auto sizes = local.sizes().vec();
    TORCH_CHECK_VALUE(!sizes.empty(), reporter.style, ": expected the input of ", reporter.module,
                      " to have dimensions, got a number");
    const int64_t own = dtensor::chunk_of(features, mesh.size(), mesh.local_rank()).length;
    TORCH_CHECK_VALUE(sizes.back() == own, reporter.style, ": expected the input of ",
                      reporter.module, " to have in its last dimension this rank's ", own, " of ",
                      features, " features, got sizes ", local.sizes(),
                      sizes.back() == features
                          ? "; if every rank has the whole input, pass .input_layouts = Replicate()"
                          : "");
    sizes.back() = features;
    return sizes;
  };
}

}  // namespace
}  // namespace parallel

using parallel::check_heads;
using parallel::distribute_parameter;

ColwiseParallel::ColwiseParallel(ColwiseParallelOptions options) : options_(options) {}

void ColwiseParallel::apply(const StyleTarget& target) const {
  constexpr const char* kStyle = "ColwiseParallel";
  const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&target.module);
  const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&target.module);
  if (linear == nullptr && embedding == nullptr) parallel::refuse_module(target, kStyle);
  parallel::ForwardPlacements wanted{.reporter = {kStyle, parallel::describe(target)},
                                     .mesh = target.mesh,
                                     .input = options_.input_layouts,
                                     .desired = Replicate(),
                                     .output = options_.output_layouts,
                                     .use_local_output = options_.use_local_output};
  parallel::distribute_once(target, kStyle, [&] {
    if (linear != nullptr) {
      check_heads(target, kStyle, linear->options.out_features(), options_.heads, options_.packed);
      distribute_parameter(target, kStyle, {"weight", Shard(0), options_.packed}, linear->weight);
      distribute_parameter(target, kStyle, {"bias", Shard(0), options_.packed}, linear->bias);
    } else {
      parallel::check_embedding(target, kStyle, *embedding);
      TORCH_CHECK_VALUE(options_.packed == 1, "parallelize_module: ", kStyle,
                        " expected no `packed` for an Embedding, got ", options_.packed, " for ",
                        parallel::describe(target));
      check_heads(target, kStyle, embedding->options.embedding_dim(), options_.heads);
      distribute_parameter(target, kStyle, {"weight", Shard(1)}, embedding->weight);
    }
  });
  if (linear != nullptr)
    wanted.whole =
        parallel::columns_of(linear->options.in_features(), target.mesh, wanted.reporter);
  parallel::place_around_forward(target.module, std::move(wanted));
}

RowwiseParallel::RowwiseParallel(RowwiseParallelOptions options) : options_(options) {}

void RowwiseParallel::apply(const StyleTarget& target) const {
  constexpr const char* kStyle = "RowwiseParallel";
  const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&target.module);
  const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&target.module);
  if (linear == nullptr && embedding == nullptr) parallel::refuse_module(target, kStyle);
  parallel::ForwardPlacements wanted{.reporter = {kStyle, parallel::describe(target)},
                                     .mesh = target.mesh,
                                     .output = options_.output_layouts,
                                     .use_local_output = options_.use_local_output};
  parallel::distribute_once(target, kStyle, [&] {
    if (linear != nullptr) {
      check_heads(target, kStyle, linear->options.in_features(), options_.heads);
      distribute_parameter(target, kStyle, {"weight", Shard(1)}, linear->weight);
      distribute_parameter(target, kStyle, {"bias", Replicate()}, linear->bias);
      wanted.input = options_.input_layouts.value_or(Shard(-1));
      wanted.desired = Shard(-1);
    } else {
      parallel::check_embedding(target, kStyle, *embedding);
      distribute_parameter(target, kStyle, {"weight", Shard(0)}, embedding->weight);
      wanted.input = options_.input_layouts.value_or(Replicate());
      wanted.desired = Replicate();
    }
  });
  if (linear != nullptr)
    wanted.whole =
        parallel::columns_of(linear->options.in_features(), target.mesh, wanted.reporter);
  parallel::place_around_forward(target.module, std::move(wanted));
}

SequenceParallel::SequenceParallel(SequenceParallelOptions options) : options_(options) {}

void SequenceParallel::apply(const StyleTarget& target) const {
  constexpr const char* kStyle = "SequenceParallel";
  parallel::distribute_once(target, kStyle, [&] {
    parallel::replicate_parameters(
        {target.module, target.mesh, target.path, /*src_data_rank=*/std::nullopt}, kStyle);
  });
  const auto sequence = Shard(options_.sequence_dim);
  const parallel::Reporter reporter{kStyle, parallel::describe(target)};
  register_forward_pre_hook(target.module, [sequence, reporter, mesh = target.mesh](
                                               torch::nn::Module&, nn::Arguments& arguments) {
    auto& tensor = parallel::first_tensor(arguments, reporter);
    tensor =
        parallel::placed_at(parallel::as_distributed(tensor, mesh, sequence, reporter), sequence);
  });
  if (!options_.use_local_output) return;
  register_forward_hook(target.module,
                        [reporter](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
                          auto& tensor = parallel::only_tensor(result, reporter);
                          tensor = DTensor::of(tensor).to_local();
                        });
}

// Styles that place inputs and outputs of a module and leave its parameters alone.

namespace parallel {
namespace {

/// What one tensor is and what it shall become.
struct Preparation {
  std::optional<Placement> given;  // none: left alone
  std::optional<Placement> desired;
  bool use_local;
};

void prepare(at::Tensor& tensor, const Preparation& preparation, const DeviceMesh& mesh,
             const Reporter& reporter) {
  if (!preparation.given || !tensor.defined()) return;
  const auto& [given, desired, use_local] = preparation;
  auto placed = as_distributed(tensor, mesh, *given, reporter);
  if (desired && !are_equal(*given, *desired, placed.dim()))
    placed = placed_at(placed, *desired, /*async_op=*/!use_local);
  tensor = use_local ? placed.to_local() : at::Tensor(placed);
}

void check_lengths(const char* style, const char* what, size_t given, size_t desired) {
  TORCH_CHECK_VALUE(desired > 0 || given == 0, style, ": expected desired_", what, " beside ", what,
                    ", got none; desired module inputs and outputs should not be left out");
  TORCH_CHECK_VALUE(given == desired, style, ": expected ", what, " and desired_", what,
                    " of the same length, got ", given, " and ", desired);
}

void check_names(const char* style, const NamedLayouts& given, const NamedLayouts& desired) {
  check_lengths(style, "input_kwarg_layouts", given.size(), desired.size());
  for (const auto& [name, placement] : given)
    TORCH_CHECK_VALUE(desired.contains(name), style,
                      ": expected desired_input_kwarg_layouts to name '", name,
                      "', which input_kwarg_layouts names");
}

void prepare_argument(const nn::Value& value, const Preparation& preparation,
                      const DeviceMesh& mesh, const Reporter& reporter, const std::string& which) {
  if (!preparation.given) return;
  size_t tensors = 0;
  value.for_each_tensor([&](at::Tensor&) { ++tensors; });
  // An optional argument that was not passed has nothing to be placed.
  if (tensors == 0 && value.is<std::optional<at::Tensor>>()) return;
  TORCH_CHECK_VALUE(tensors == 1, reporter.style, ": expected argument ", which, " of ",
                    reporter.module,
                    " to be a tensor, as a layout is given for it, got something with ", tensors,
                    " tensors; leave it out with std::nullopt");
  value.for_each_tensor([&](at::Tensor& tensor) { prepare(tensor, preparation, mesh, reporter); });
}

std::vector<std::string> names_in(const nn::Arguments& arguments) {
  std::vector<std::string> names;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (*arguments[i].name() != '\0') names.emplace_back(arguments[i].name());
  }
  return names;
}

void prepare_named(const nn::Arguments& arguments, const PrepareModuleInputOptions& options,
                   const DeviceMesh& mesh, const Reporter& reporter) {
  for (const auto& [name, given] : options.input_kwarg_layouts) {
    const auto* value = arguments.find(name);
    TORCH_CHECK_VALUE(value != nullptr, reporter.style, ": expected forward of ", reporter.module,
                      " to have a parameter '", name, "'; it has ",
                      format_list(names_in(arguments)),
                      "; name them in TESSERA_MODULE(Net, \"x\", …)");
    prepare_argument(
        *value, {given, options.desired_input_kwarg_layouts.at(name), options.use_local_output},
        mesh, reporter, "'" + name + "'");
  }
}

void prepare_positional(const nn::Arguments& arguments, const PrepareModuleInputOptions& options,
                        const DeviceMesh& mesh, const Reporter& reporter) {
  if (options.input_layouts.empty()) return;
  std::vector<size_t> positions;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!options.input_kwarg_layouts.contains(arguments[i].name())) positions.push_back(i);
  }
  TORCH_CHECK_VALUE(positions.size() == options.input_layouts.size(), reporter.style,
                    ": expected a call of ", reporter.module, " with ",
                    options.input_layouts.size(),
                    " arguments, as many as there are input_layouts, got ", positions.size(),
                    "; give one layout per argument, std::nullopt for those to be left alone");
  for (size_t i = 0; i < positions.size(); ++i) {
    prepare_argument(
        arguments[positions[i]],
        {options.input_layouts[i], options.desired_input_layouts[i], options.use_local_output},
        mesh, reporter, std::to_string(positions[i]));
  }
}

void prepare_result(nn::Result& result, const PrepareModuleOutputOptions& options,
                    const DeviceMesh& mesh, const Reporter& reporter) {
  size_t tensors = 0;
  result.for_each_tensor([&](at::Tensor&) { ++tensors; });
  TORCH_CHECK_VALUE(tensors == options.output_layouts.size(), reporter.style, ": expected ",
                    reporter.module, " to return ", options.output_layouts.size(),
                    " tensors, as many as there are output_layouts, got ", tensors,
                    "; give one layout per tensor, std::nullopt for those to be left alone");
  size_t i = 0;
  result.for_each_tensor([&](at::Tensor& tensor) {
    prepare(
        tensor,
        {options.output_layouts[i], options.desired_output_layouts[i], options.use_local_output},
        mesh, reporter);
    ++i;
  });
}

}  // namespace
}  // namespace parallel

PrepareModuleInput::PrepareModuleInput(PrepareModuleInputOptions options)
    : options_(std::move(options)) {
  constexpr const char* kStyle = "PrepareModuleInput";
  parallel::check_lengths(kStyle, "input_layouts", options_.input_layouts.size(),
                          options_.desired_input_layouts.size());
  parallel::check_names(kStyle, options_.input_kwarg_layouts, options_.desired_input_kwarg_layouts);
}

void PrepareModuleInput::apply(const StyleTarget& target) const {
  parallel::require_hookable(target, "PrepareModuleInput");
  const parallel::Reporter reporter{"PrepareModuleInput", parallel::describe(target)};
  register_forward_pre_hook(target.module, [options = options_, reporter, mesh = target.mesh](
                                               torch::nn::Module&, nn::Arguments& arguments) {
    parallel::prepare_positional(arguments, options, mesh, reporter);
    parallel::prepare_named(arguments, options, mesh, reporter);
  });
}

PrepareModuleOutput::PrepareModuleOutput(PrepareModuleOutputOptions options)
    : options_(std::move(options)) {
  constexpr const char* kStyle = "PrepareModuleOutput";
  TORCH_CHECK_VALUE(!options_.output_layouts.empty(), kStyle,
                    ": expected output_layouts and desired_output_layouts, got none");
  parallel::check_lengths(kStyle, "output_layouts", options_.output_layouts.size(),
                          options_.desired_output_layouts.size());
}

void PrepareModuleOutput::apply(const StyleTarget& target) const {
  parallel::require_hookable(target, "PrepareModuleOutput");
  const parallel::Reporter reporter{"PrepareModuleOutput", parallel::describe(target)};
  register_forward_hook(target.module, [options = options_, reporter, mesh = target.mesh](
                                           torch::nn::Module&, nn::Arguments&, nn::Result& result) {
    parallel::prepare_result(result, options, mesh, reporter);
  });
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareModuleInputOutputOptions options)
    : input_({.input_layouts = std::move(options.input_layouts),
              .desired_input_layouts = std::move(options.desired_input_layouts),
              .input_kwarg_layouts = std::move(options.input_kwarg_layouts),
              .desired_input_kwarg_layouts = std::move(options.desired_input_kwarg_layouts),
              .use_local_output = options.use_local_input}),
      output_({.output_layouts = std::move(options.output_layouts),
               .desired_output_layouts = std::move(options.desired_output_layouts),
               .use_local_output = options.use_local_output}) {}

void PrepareModuleInputOutput::apply(const StyleTarget& target) const {
  input_.apply(target);
  output_.apply(target);
}

}  // namespace tessera
