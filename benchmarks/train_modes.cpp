#include "train_modes.h"

#include <tessera/comm.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <numeric>

namespace tessera::benchmarks {
namespace {

constexpr const char* kEager = "eager";  // no parallel function
constexpr const char* kFp8 = "fp8";
constexpr const char* kFp8Rowwise = "fp8_rowwise";

struct Mode {
  const char* name;
  void (*apply)(Job&);
  bool on_cuda = false;
  bool on_cpu = true;
};

/// Every second layer joins what the one before it split.
ParallelPlan tensor_plan(const torch::nn::Module& model) {
  const auto children = model.named_children();
  if (children.contains("first"))
    return {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}};
  if (children.contains("layers")) {
    return {{"layers.[02]", ColwiseParallel()}, {"layers.[13]", RowwiseParallel()}};
  }
  if (children.contains("rotary")) {
    return {{"blocks.*.mlp.gate_proj", ColwiseParallel()},
            {"blocks.*.mlp.up_proj", ColwiseParallel()},
            {"blocks.*.mlp.down_proj", RowwiseParallel()}};
  }
  return {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}};
}

/// Both layers of the mlp, every layer of net2000, every block of the gpt and the qwen; then the
/// rest.
void shard(Job& job) {
  const FullyShardOptions options{.mesh = init_device_mesh(job.device.type(), {world_size()})};
  for (const auto& child : job.model->named_children()) {
    if (child.key() == "first" || child.key() == "second") fully_shard(*child.value(), options);
    if (child.key() != "layers" && child.key() != "blocks") continue;
    for (const auto& unit : child.value()->children()) fully_shard(*unit, options);
  }
  fully_shard(*job.model, options);
}

/// The head, whose sums of exponentials follow, stays in 16 bits, as is usual.
template <Fp8Scaling kScaling>
void use_fp8(Job& job) {
  fp8(*job.model, {.scaling = kScaling,
                   .filter = [](const auto& name, const auto&) { return name != "head"; }});
}

const Mode kModes[] = {
    {kEager, [](Job&) {}, /*on_cuda=*/true},
    {"replicate", [](Job& job) { tessera::replicate(job.model); }, /*on_cuda=*/true},
    {"fully_shard", shard, /*on_cuda=*/true},
    {"tp",
     [](Job& job) {
       parallelize_module(job.model, init_device_mesh(torch::kCPU, {world_size()}),
                          tensor_plan(*job.model));
     }},
    {kFp8, use_fp8<Fp8Scaling::Tensorwise>, /*on_cuda=*/true, /*on_cpu=*/false},
    {kFp8Rowwise, use_fp8<Fp8Scaling::Rowwise>,
     /*on_cuda=*/true, /*on_cpu=*/false},
};
struct CompiledMode {
  const char* name;
  bool on_cuda = false;
  bool on_cpu = true;
};
constexpr CompiledMode kCompiled[] = {
    {"compile", /*on_cuda=*/true},
    {"replicate+compile"},
    {"fully_shard+compile"},
    {"tp+compile"},
    {"fp8+compile", /*on_cuda=*/true, /*on_cpu=*/false},
    {"fp8_rowwise+compile", /*on_cuda=*/true, /*on_cpu=*/false},
};
constexpr const char* kSuffix = "+compile";

Group group_of_all(const std::string& backend) {
  std::vector<int> everybody(static_cast<size_t>(world_size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  return new_group(everybody, {.backend = backend});
}

}  // namespace

std::vector<std::string> mode_names(c10::DeviceType device) {
  const bool on_cuda = device == c10::DeviceType::CUDA;
  std::vector<std::string> names;
  const auto add = [&](const auto& mode) {
    if (on_cuda ? mode.on_cuda : mode.on_cpu) names.emplace_back(mode.name);
  };
  for (const auto& mode : kModes) add(mode);
  for (const auto& mode : kCompiled) add(mode);
  return names;
}

bool is_compiled(const std::string& mode) {
  return std::ranges::any_of(kCompiled, [&](const auto& known) { return mode == known.name; });
}

std::string eager_mode(const std::string& mode) {
  if (!is_compiled(mode)) return mode;
  return mode == "compile" ? kEager : mode.substr(0, mode.size() - std::string(kSuffix).size());
}

bool is_fp8(const std::string& mode) {
  return eager_mode(mode) == kFp8 || eager_mode(mode) == kFp8Rowwise;
}

std::string peer_mode(const std::string& mode) { return is_fp8(mode) ? kEager : eager_mode(mode); }

int batch_rank(const std::string& mode) { return eager_mode(mode) == "tp" ? 0 : rank(); }

int ranks_with_batches(const std::string& mode) {
  return eager_mode(mode) == "tp" ? 1 : world_size();
}

void parallelise(Job& job, const std::string& name) {
  for (const auto& mode : kModes) {
    if (eager_mode(name) == mode.name) return mode.apply(job);
  }
  TORCH_CHECK_VALUE(false, "bench train: expected a mode of --list, got '", name, "'");
}

void parallelise_with_reducer(Job& job, const std::string& backend) {
  const auto parameters = job.model->parameters();
  const std::vector<bool> sparse(parameters.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {c10d::kDefaultFirstBucketBytes, c10d::kDefaultBucketBytesCap}, sparse));
  // Gradients come in the order opposite to the parameters'; after the first step the reducer
  // buckets them anew, by the order it saw.
  std::reverse(buckets.begin(), buckets.end());
  auto reducer = std::make_shared<c10d::Reducer>(
      parameters, std::move(buckets), group_of_all(backend), sparse, c10d::kDefaultBucketBytesCap,
      /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false,
      /*param_names=*/std::unordered_map<size_t, std::string>(), c10d::kDefaultFirstBucketBytes,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>());
  job.forward = [reducer, forward = std::move(job.forward)] {
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    auto output = forward();
    reducer->prepare_for_backward({});
    return output;
  };
}

}  // namespace tessera::benchmarks
