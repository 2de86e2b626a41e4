#include "memory_modes.h"

#include <tessera/checkpoint.h>
#include <tessera/comm.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <algorithm>

namespace tessera::benchmarks {
namespace {

constexpr const char* kGpt = "gpt";
constexpr const char* kAttention = "attention";
constexpr const char* kContextParallel = "context_parallel";
constexpr int64_t kFeatures = 64;  // of attention, which has one head

/// Bytes of a plain model's parameters, and of the units that fully_shard makes of them.
struct ModelBytes {
  size_t all = 0;
  size_t root = 0;             // outside of blocks
  size_t largest_unit = 0;     // of the blocks
  size_t keys_and_values = 0;  // of a rank's part of attention's sequence
};

size_t parameter_bytes(const torch::nn::Module& module) {
  size_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += parameter.nbytes();
  return bytes;
}

std::shared_ptr<torch::nn::Module> block_of(const Job& job, int index) {
  return get_submodule(*job.model, "blocks." + std::to_string(index));
}

ModelBytes model_bytes(const MemoryJob& job) {
  const auto plain = make_in_mode(job, "plain", /*batch=*/0);
  ModelBytes bytes{.all = parameter_bytes(*plain.model)};
  bytes.root = bytes.all;
  if (job.name == kAttention)
    bytes.keys_and_values =
        2 * sizeof(float) * kFeatures * static_cast<size_t>(job.tokens / world_size());
  for (int i = 0; i < job.blocks && job.name == kGpt; ++i) {
    const auto unit = parameter_bytes(*block_of(plain, i));
    bytes.root -= unit;
    bytes.largest_unit = std::max(bytes.largest_unit, unit);
  }
  return bytes;
}

void leave_alone(torch::nn::Module& /*module*/) {}
void shard(torch::nn::Module& module) { fully_shard(module); }
DeviceMesh all_ranks() { return {torch::kCPU, at::arange(world_size(), torch::kLong), {"cp"}}; }
void parallelize_context(torch::nn::Module& module) {
  parallelize_module(module, all_ranks(), ContextParallel());
  replicate(module, {.mesh = all_ranks()});
}
size_t no_bound(const ModelBytes& /*model*/, const MemoryUse& /*plain*/) { return 0; }

size_t checkpoint_bound(const ModelBytes& /*model*/, const MemoryUse& plain) {
  return static_cast<size_t>(0.3 * static_cast<double>(plain.peak_bytes));
}

/// This rank's part of parameters, gradients and two moments; the outermost unit, whole between
/// forward and backward; two units' parameters, one in use and one on its way; two units'
/// gradients, likewise; and plain training's activations.
size_t fully_shard_bound(const ModelBytes& model, const MemoryUse& plain) {
  const auto ranks = static_cast<size_t>(world_size());
  const auto shards = 4 * ((model.all + ranks - 1) / ranks);
  return shards + model.root + 2 * model.largest_unit + 2 * model.largest_unit + plain.peak_bytes;
}

/// A rank's part of plain training's activations, and six times its keys and values: packed for
/// the others, in use and on their way here; sums of their gradients, kept, sent and on their way.
size_t context_parallel_bound(const ModelBytes& model, const MemoryUse& plain) {
  return plain.peak_bytes / static_cast<size_t>(world_size()) + 6 * model.keys_and_values;
}

struct Mode {
  const char* name;
  void (*apply_to_block)(torch::nn::Module& block);
  void (*apply_to_model)(torch::nn::Module& model);
  bool is_exact;
  bool is_start;
  size_t (*bound)(const ModelBytes& model, const MemoryUse& plain);
};
const Mode kModes[] = {
    {"plain", leave_alone, leave_alone, true, false, no_bound},
    {"checkpoint", [](torch::nn::Module& block) { checkpoint(block); }, leave_alone, true, false,
     checkpoint_bound},
    {"fully_shard", shard, shard, false, false, fully_shard_bound},
    {"fully_shard_start", shard, shard, false, true, fully_shard_bound},
    {kContextParallel, leave_alone, parallelize_context, false, false, context_parallel_bound},
};

const Mode& mode_of(const std::string& name) {
  for (const auto& mode : kModes) {
    if (name == mode.name) return mode;
  }
  TORCH_CHECK_VALUE(false, "bench memory: expected a mode of --list, got '", name, "'");
}

/// One layer of causal attention with a head of 64 features, on one sequence.
Job make_attention(int64_t tokens, const std::string& mode, int batch) {
  torch::manual_seed(0);
  nn::GroupedQueryAttention layer(nn::GroupedQueryAttentionOptions{
      .d_model = kFeatures, .heads = 1, .kv_heads = 1, .max_position = tokens});
  torch::manual_seed(batch + 1);
  auto x = at::randn({1, tokens, kFeatures});
  if (mode == kContextParallel) x = context_parallel_shard(x, 1, all_ranks());
  mode_of(mode).apply_to_model(*layer);
  return {.model = layer.ptr(),
          .forward = [layer, x]() mutable { return layer(x); },
          .loss = [](const at::Tensor& output) { return output.square().mean(); },
          .tokens = x.size(1)};
}

}  // namespace

std::vector<std::string> memory_job_names() { return {kGpt, kAttention}; }

std::vector<std::string> memory_mode_names() {
  std::vector<std::string> names;
  for (const auto& mode : kModes) names.emplace_back(mode.name);
  return names;
}

std::string MemoryJob::label() const {
  return name == kAttention ? c10::str(name, " of ", tokens, " tokens") : name;
}

bool has_mode(const MemoryJob& job, const std::string& mode) {
  if (mode == kModes[0].name) return true;
  return (mode == kContextParallel) == (job.name == kAttention);
}

Job make_in_mode(const MemoryJob& job, const std::string& mode, int batch) {
  TORCH_CHECK_VALUE(job.name == kGpt || job.name == kAttention,
                    "bench memory: expected a job of --list, got '", job.name, "'");
  if (job.name == kAttention) return make_attention(job.tokens, mode, batch);
  auto made = make_gpt(batch, job.blocks, /*has_memory=*/!is_start(mode));
  for (int i = 0; i < job.blocks; ++i) mode_of(mode).apply_to_block(*block_of(made, i));
  mode_of(mode).apply_to_model(*made.model);
  return made;
}

bool is_timed(const MemoryJob& job) { return job.name != kAttention; }

bool is_exact(const std::string& mode) { return mode_of(mode).is_exact; }

bool is_start(const std::string& mode) { return mode_of(mode).is_start; }

size_t bound_of(const MemoryJob& job, const std::string& mode, const MemoryUse& plain) {
  return mode_of(mode).bound(model_bytes(job), plain);
}

std::string describe_units(const torch::nn::Module& model) {
  std::string lines;
  for (const auto& module : model.named_modules()) {
    const auto state = fully_shard_state(*module.value());
    if (!state) continue;
    const auto stats = state->stats();
    lines += c10::str("unit '", module.key(), "': ", stats.shard_bytes, " of ",
                      stats.parameter_bytes, " bytes kept, whole ", stats.gathers, " times in ",
                      stats.gathered_bytes, " private bytes, ", stats.freed_bytes, " freed\n");
  }
  return lines;
}

}  // namespace tessera::benchmarks
