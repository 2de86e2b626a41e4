#include "train/parallelize.h"

#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "train/adapters.h"
#include "train/agreed.h"

#include <ATen/Context.h>

#include <algorithm>

namespace tessera::train {
namespace {

bool has(const DeviceMesh& mesh, const std::string& name) {
  return std::ranges::count(mesh.dim_names(), name) > 0;
}

/// Whether ranks keep shards of what parallelize_module has not spread over others.
bool shards_alone(const Layout& layout, const Settings& settings) {
  return settings.parallel != "replicate" && layout.mesh.root().size() > 1 &&
         !has(layout.mesh, "tp");
}

}  // namespace

std::shared_ptr<PowerSGDState> make_powersgd(const Settings& settings) {
  if (settings.comm_hook != "powersgd") return nullptr;
  return std::make_shared<PowerSGDState>(
      PowerSGDOptions{.start_powerSGD_iter = std::max<int64_t>(2, settings.warmup)});
}

c10::DeviceType device_type_of(const Settings& settings) {
  return settings.device == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

c10::Device device_of(const Settings& settings) {
  const auto type = device_type_of(settings);
  if (type == c10::DeviceType::CPU) return type;
  return {type, static_cast<c10::DeviceIndex>(local_rank() % at::getNumGPUs())};
}

Layout make_layout(const Settings& settings) {
  auto dims = parse_mesh(settings.mesh);
  if (dims.empty()) dims.emplace_back("dp", world_size());
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (const auto& [name, size] : dims) {
    shape.push_back(size);
    names.push_back(name);
  }
  Layout layout{.mesh = init_device_mesh(device_type_of(settings), shape, names)};
  for (const auto& [name, size] : dims) {
    if (name == "tp" || name == "cp" || name == "pp") continue;
    layout.data_rank = layout.data_rank * size + layout.mesh.local_rank(name);
    layout.data_ranks *= size;
  }
  const auto& mesh = layout.mesh;
  if (has(mesh, "cp")) layout.context = mesh["cp"];
  if (has(mesh, "dp")) layout.gradients = mesh["dp"];
  if (layout.context)
    layout.gradients = has(mesh, "dp") ? mesh[{"dp", "cp"}].flatten() : *layout.context;
  return layout;
}

namespace {

PipelineSchedule schedule_of(const std::string& name) {
  return name == "gpipe"         ? PipelineSchedule::GPipe
         : name == "1f1b"        ? PipelineSchedule::OneFOneB
         : name == "interleaved" ? PipelineSchedule::Interleaved1F1B
         : name == "zero-bubble" ? PipelineSchedule::ZeroBubble
                                 : PipelineSchedule::ZBVZeroBubble;
}

void cut(LanguageModel& model, const Layout& layout, const Settings& settings) {
  model.cut({.mesh = layout.mesh["pp"],
             .schedule = schedule_of(settings.pipeline_schedule),
             .n_microbatches = static_cast<int>(settings.microbatches)});
  if (!layout.gradients) return;
  for (auto stage : model.pipeline()->stages()) replicate(stage, {.mesh = *layout.gradients});
}

void spread(LanguageModel& model, const Layout& layout, const Settings& settings,
            const std::shared_ptr<PowerSGDState>& powersgd) {
  const auto& mesh = layout.mesh;
  const auto root = model.module();
  const auto blocks = model.blocks();
  const auto start = model.start_values();  // by the order of modules, without adapters

  if (has(mesh, "tp")) parallelize_module(root, mesh["tp"], model.tensor_plan());
  if (layout.context) parallelize_module(root, *layout.context, model.context_plan());
  try {
    add_adapters(model, settings);
  } catch (const c10::ValueError& error) {  // on all ranks alike
    throw AgreedError(message_of(error), kWrongSettings);
  }

  if (settings.checkpoint_activations != "none") {
    CheckpointOptions options;
    if (settings.checkpoint_activations == "selective")
      options.context_fn = selective_contexts(save_matmul_results());
    for (const auto& block : blocks) checkpoint(block, options);
  }

  if (has(mesh, "pp")) {
    cut(model, layout, settings);
    return;
  }
  if (!layout.gradients || mesh.root().size() == 1) return;
  if (settings.parallel == "replicate") {
    replicate(root, {.mesh = *layout.gradients});
    if (settings.comm_hook == "fp16") register_comm_hook(root, fp16_compress_hook);
    if (settings.comm_hook == "bf16") register_comm_hook(root, bf16_compress_hook);
    if (powersgd) register_comm_hook(root, powersgd->hook());
    return;
  }
  FullyShardOptions options;
  options.device_id = device_of(settings);
  options.param_init_fn = start;
  if (settings.parallel == "hybrid") {
    options.strategy = ShardingStrategy::HYBRID_SHARD;
    options.mesh = mesh[{"replicas", "dp"}];
  } else {
    options.mesh = *layout.gradients;
  }
  for (const auto& block : blocks) fully_shard(block, options);
  fully_shard(root, options);
}

}  // namespace

void parallelize(LanguageModel& model, const Layout& layout, const Settings& settings,
                 const std::shared_ptr<PowerSGDState>& powersgd) {
  // Of a model too large for one rank fully_shard makes a unit at a time.
  if (!shards_alone(layout, settings) || !model.start_values()) model.place(device_of(settings));
  spread(model, layout, settings, powersgd);
  if (settings.from.empty() || settings.resume) return;
  try {
    model.load(settings.from);
  } catch (const c10::Error& error) {  // on all ranks alike
    throw AgreedError("--from: " + message_of(error), kWrongSettings);
  }
}

}  // namespace tessera::train
