// Styles that distribute parameters.
#include <tessera/parallel/styles.h>

#include "nn/composable.h"
#include "parallel/boundary.h"
#include "parallel/parameters.h"

#include <c10/util/Exception.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>

#include <algorithm>

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
  nn::apply_composable(target.module,
                       {.function = kFunction, .excludes = {"distribute_module", "fully_shard"}},
                       [&] {
                         distribute();
                         return std::make_shared<StyleState>(style);
                       });
}

/// What a style wants to happen around forward.
struct Passage {
  Speaker speaker;
  DeviceMesh mesh;
  Placement input = {};    // of plain inputs
  Placement desired = {};  // of the input, when forward runs
  Placement output = {};
  bool use_local_output = true;
  WholeSizes whole = {};  // of plain inputs
};

void add_passage(torch::nn::Module& module, Passage passage) {
  const auto shared = std::make_shared<const Passage>(std::move(passage));
  register_forward_pre_hook(module, [shared](torch::nn::Module&, nn::Arguments& arguments) {
    auto& tensor = first_tensor(arguments, shared->speaker);
    tensor = placed_at(
        as_distributed(tensor, shared->mesh, shared->input, shared->speaker, shared->whole),
        shared->desired);
  });
  register_forward_hook(module, [shared](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
    auto& tensor = only_tensor(result, shared->speaker);
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
WholeSizes columns_of(int64_t features, const DeviceMesh& mesh, const Speaker& speaker) {
  return [features, mesh, speaker](const at::Tensor& local) {
    auto sizes = local.sizes().vec();
    TORCH_CHECK_VALUE(!sizes.empty(), speaker.style, ": expected the input of ", speaker.module,
                      " to have dimensions, got a number");
    const int64_t rank = mesh.local_rank();
    const int64_t chunk = (features + mesh.size() - 1) / mesh.size();
    const int64_t own = std::clamp<int64_t>(features - rank * chunk, 0, chunk);
    TORCH_CHECK_VALUE(sizes.back() == own, speaker.style, ": expected the input of ",
                      speaker.module, " to have in its last dimension this rank's ", own, " of ",
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
  parallel::Passage passage{.speaker = {kStyle, parallel::describe(target)},
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
    passage.whole =
        parallel::columns_of(linear->options.in_features(), target.mesh, passage.speaker);
  parallel::add_passage(target.module, std::move(passage));
}

RowwiseParallel::RowwiseParallel(RowwiseParallelOptions options) : options_(options) {}

void RowwiseParallel::apply(const StyleTarget& target) const {
  constexpr const char* kStyle = "RowwiseParallel";
  const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&target.module);
  const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&target.module);
  if (linear == nullptr && embedding == nullptr) parallel::refuse_module(target, kStyle);
  parallel::Passage passage{.speaker = {kStyle, parallel::describe(target)},
                            .mesh = target.mesh,
                            .output = options_.output_layouts,
                            .use_local_output = options_.use_local_output};
  parallel::distribute_once(target, kStyle, [&] {
    if (linear != nullptr) {
      check_heads(target, kStyle, linear->options.in_features(), options_.heads);
      distribute_parameter(target, kStyle, {"weight", Shard(1)}, linear->weight);
      distribute_parameter(target, kStyle, {"bias", Replicate()}, linear->bias);
      passage.input = options_.input_layouts.value_or(Shard(-1));
      passage.desired = Shard(-1);
    } else {
      parallel::check_embedding(target, kStyle, *embedding);
      distribute_parameter(target, kStyle, {"weight", Shard(0)}, embedding->weight);
      passage.input = options_.input_layouts.value_or(Replicate());
      passage.desired = Replicate();
    }
  });
  if (linear != nullptr)
    passage.whole =
        parallel::columns_of(linear->options.in_features(), target.mesh, passage.speaker);
  parallel::add_passage(target.module, std::move(passage));
}

SequenceParallel::SequenceParallel(SequenceParallelOptions options) : options_(options) {}

void SequenceParallel::apply(const StyleTarget& target) const {
  constexpr const char* kStyle = "SequenceParallel";
  parallel::distribute_once(target, kStyle, [&] {
    parallel::replicate_parameters(
        {target.module, target.mesh, target.path, /*src_data_rank=*/std::nullopt}, kStyle);
  });
  const auto sequence = Shard(options_.sequence_dim);
  const parallel::Speaker speaker{kStyle, parallel::describe(target)};
  register_forward_pre_hook(target.module, [sequence, speaker, mesh = target.mesh](
                                               torch::nn::Module&, nn::Arguments& arguments) {
    auto& tensor = parallel::first_tensor(arguments, speaker);
    tensor =
        parallel::placed_at(parallel::as_distributed(tensor, mesh, sequence, speaker), sequence);
  });
  if (!options_.use_local_output) return;
  register_forward_hook(target.module,
                        [speaker](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
                          auto& tensor = parallel::only_tensor(result, speaker);
                          tensor = DTensor::of(tensor).to_local();
                        });
}

}  // namespace tessera
