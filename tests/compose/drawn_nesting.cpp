#include "compose/drawn_nesting.h"

#include <tessera/checkpoint.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::testing {
namespace {

std::optional<bool> draw_choice(Random& random) {
  const auto choice = draw(random, 0, 2);
  if (choice == 0) return std::nullopt;
  return choice == 1;
}

void draw_unit(Random& random, const Layout& layout, Application& application) {
  application.strategy = static_cast<ShardingStrategy>(draw(random, 0, layout.hybrid ? 4 : 2));
  application.has_two_dimensions =
      layout.hybrid && application.strategy != ShardingStrategy::NO_SHARD &&
      (application.strategy >= ShardingStrategy::HYBRID_SHARD || one_in(random, 2));
  application.reshard_after_forward = draw_choice(random);
  application.forward_prefetch = draw_choice(random);
  application.accumulate_sharded = one_in(random, 2);
}

bool has_unused(const Shape& shape) {
  return shape.has_unused || std::any_of(shape.parts.begin(), shape.parts.end(), has_unused);
}

void draw_function(Random& random, const Layout& layout, bool is_root, Application& application) {
  const auto choice = draw(random, is_root ? 2 : 0, 5);
  if (choice < 2) return;
  application.function = choice < 4 ? Function::FullyShard : Function::Replicate;
  if (application.function == Function::FullyShard) {
    draw_unit(random, layout, application);
    if (one_in(random, 4)) application.policy = static_cast<Policy>(draw(random, 1, 3));
    return;
  }
  application.gradient_as_bucket_view = one_in(random, 2);
  application.overlap = draw_choice(random);
  if (one_in(random, 2)) application.bucket_cap_mb = 1e-4;
}

/// The parts become one unit, with options of their own.
void draw_joined(Random& random, const Shape& shape, const Layout& layout,
                 Application& application) {
  const bool can_join =
      shape.kind == Kind::Branch && shape.parts.size() > 1 &&
      std::none_of(shape.parts.begin(), shape.parts.end(), [](auto& s) { return s.runs_twice; });
  if (!can_join || !one_in(random, 4)) return;
  application.joins_parts = true;
  for (auto& part : application.parts) {
    part.function = Function::Joined;
    part.policy = Policy::None;
  }
  draw_unit(random, layout, application.parts[0]);
}

/// Whether a function applied to the module would find something to train; what is inside others is
/// theirs.
bool trains(const Shape& shape, const Application& application) {
  if (shape.parts.empty()) return !shape.is_frozen;
  if (shape.kind == Kind::Branch && (shape.has_gain || shape.has_bare)) return true;
  for (size_t i = 0; i < shape.parts.size(); ++i) {
    const auto& part = application.parts[i];
    if (part.function == Function::None && trains(shape.parts[i], part)) return true;
  }
  return shape.kind == Kind::Root;
}

FullyShardOptions unit_options(const Application& application, const Layout& layout) {
  FullyShardOptions options{.strategy = application.strategy,
                            .mixed_precision = application.precision,
                            .forward_prefetch = application.forward_prefetch,
                            .mesh = application.has_two_dimensions ? layout.hybrid : layout.data,
                            .reshard_after_forward = application.reshard_after_forward,
                            .accumulate_sharded = application.accumulate_sharded};
  if (application.policy == Policy::OfLayers)
    options.policy = ModuleWrapPolicy::of<torch::nn::LinearImpl>();
  if (application.policy == Policy::OfMlps) options.policy = ModuleWrapPolicy::of<MlpImpl>();
  if (application.policy == Policy::Custom) {
    options.policy = CustomPolicy([](torch::nn::Module& module) -> WrapDecision {
      if (module.as<MlpImpl>() == nullptr) return module.as<torch::nn::SequentialImpl>() != nullptr;
      return [](FullyShardOptions& changed) { changed.reshard_after_forward = false; };
    });
  }
  return options;
}

void apply_data_parallel(const Application& application, const Part& part, const Layout& layout) {
  if (application.function == Function::FullyShard)
    fully_shard(part.module, unit_options(application, layout));
  if (application.function == Function::Replicate)
    replicate(part.module, {.mesh = layout.data,
                            .bucket_cap_mb = application.bucket_cap_mb,
                            .find_unused_parameters = application.finds_unused,
                            .gradient_as_bucket_view = application.gradient_as_bucket_view,
                            .overlap = application.overlap});
}

void parallelize(const Application& application, const Part& part, const Layout& layout) {
  if (application.is_tensor_parallel)
    parallelize_module(part.module, *layout.tensor,
                       {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  for (size_t i = 0; i < part.parts.size(); ++i)
    parallelize(application.parts[i], part.parts[i], layout);
}

void apply_inside_out(const Application& application, const Part& part, const Layout& layout) {
  for (size_t i = 0; i < part.parts.size(); ++i)
    apply_inside_out(application.parts[i], part.parts[i], layout);
  if (application.joins_parts) {
    std::vector<nn::ModuleRef> joined;
    for (const auto& inner : part.parts) joined.emplace_back(inner.module);
    fully_shard(joined, unit_options(application.parts[0], layout));
    for (size_t i = 0; i < part.parts.size(); ++i) {
      const auto& inner = application.parts[i];
      if (inner.is_checkpointed && !inner.checkpoints_first) checkpoint(part.parts[i].module);
    }
  }
  if (application.is_checkpointed && application.checkpoints_first) checkpoint(part.module);
  apply_data_parallel(application, part, layout);
  const bool waits_for_unit = application.function == Function::Joined;
  if (application.is_checkpointed && !application.checkpoints_first && !waits_for_unit)
    checkpoint(part.module);
}

std::string describe_choice(const char* name, std::optional<bool> choice) {
  return choice ? c10::str(*choice ? " " : " no ", name) : "";
}

std::string describe_unit(const Application& application) {
  const char* kStrategies[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                               "HYBRID_SHARD_ZERO2"};
  const char* kPolicies[] = {"", " policy of layers", " policy of mlps", " custom policy"};
  return c10::str("fully_shard(", kStrategies[static_cast<int>(application.strategy)],
                  application.has_two_dimensions ? " 2-D" : "",
                  kPolicies[static_cast<int>(application.policy)],
                  describe_choice("reshard", application.reshard_after_forward),
                  describe_choice("prefetch", application.forward_prefetch),
                  application.accumulate_sharded ? " accumulates shards" : "",
                  application.precision.param_dtype ? " bfloat16" : "",
                  application.precision.reduce_dtype ? " reduced in float" : "", ")");
}

std::string describe_function(const Application& application) {
  if (application.function == Function::FullyShard)
    return c10::str(" ", describe_unit(application));
  if (application.function == Function::Joined) return " joined";
  if (application.function == Function::None) return "";
  return c10::str(" replicate(", application.gradient_as_bucket_view ? "views" : "copies",
                  describe_choice("overlap", application.overlap),
                  application.finds_unused ? " finds unused" : "",
                  application.bucket_cap_mb ? " small buckets)" : ")");
}

void compute_low(Random& random, Application& application) {
  if (application.function == Function::Replicate) application.function = Function::None;
  application.precision.param_dtype = torch::kBFloat16;
  if (one_in(random, 2)) application.precision.reduce_dtype = torch::kFloat;
  for (auto& part : application.parts) compute_low(random, part);
}

}  // namespace

Application draw_nesting(Random& random, const Shape& shape, const Layout& layout) {
  Application application;
  for (const auto& part : shape.parts)
    application.parts.push_back(draw_nesting(random, part, layout));
  application.is_tensor_parallel = shape.kind == Kind::Mlp && layout.tensor && !one_in(random, 3);
  application.is_checkpointed = one_in(random, 3);
  application.checkpoints_first = one_in(random, 2);
  draw_function(random, layout, shape.kind == Kind::Root, application);
  draw_joined(random, shape, layout, application);
  // replicate refuses modules without anything to average.
  if (application.function == Function::Replicate && !trains(shape, application))
    application.function = Function::None;
  application.finds_unused = application.function == Function::Replicate && has_unused(shape);
  return application;
}

void draw_precision(Random& random, const Layout& layout, Application& root) {
  compute_low(random, root);
  if (root.function == Function::FullyShard) return;
  root.function = Function::FullyShard;
  draw_unit(random, layout, root);
}

std::string describe(const Shape& shape, const Application& application) {
  const std::string checkpoint = application.is_checkpointed ? " checkpoint" : "";
  auto text = c10::str("[", describe(shape));
  if (application.is_tensor_parallel) text += " tensor parallel";
  if (application.checkpoints_first) text += checkpoint;
  text += describe_function(application);
  if (!application.checkpoints_first) text += checkpoint;
  if (application.joins_parts)
    text += c10::str(" parts as one ", describe_unit(application.parts[0]));
  for (size_t i = 0; i < shape.parts.size(); ++i)
    text += c10::str(" ", describe(shape.parts[i], application.parts[i]));
  return text + "]";
}

void apply(const Application& application, const Part& part, const Layout& layout) {
  if (layout.tensor) parallelize(application, part, layout);
  apply_inside_out(application, part, layout);
}

}  // namespace tessera::testing
