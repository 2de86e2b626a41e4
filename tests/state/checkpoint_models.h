#pragma once

#include <tessera/tessera.h>

#include "support/twins.h"

#include <torch/torch.h>

#include <optional>

/// A small model in every layout.
namespace tessera::testing {

/// Rows of 5 and 7 leave uneven and empty shards on 2 to 4 ranks; `qkv` can be packed.
struct CheckpointNetImpl : torch::nn::Module {
  CheckpointNetImpl() {
    in = register_module("in", nn::Linear(7, 12));
    qkv = register_module("qkv", nn::Linear(12, 36));
    out = register_module("out", nn::Linear(12, 7));
    norm = register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    head = register_module("head", nn::Linear(7, 5));
    scale = register_parameter("scale", at::full({}, 1.5));
    seen = register_buffer("seen", at::zeros({}, at::kLong));
    mask = register_buffer("mask", at::ones({7}, at::kBool));
    scratch = tessera::register_buffer(*this, "scratch", at::zeros({3}), /*persistent=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(torch::relu(in(x))).chunk(3, -1);
    return head(norm(out(parts[0] * torch::tanh(parts[1]) + parts[2]))) * scale;
  }
  nn::Linear in{nullptr}, qkv{nullptr}, out{nullptr}, head{nullptr};
  nn::LayerNorm norm{nullptr};
  at::Tensor scale, seen, mask, scratch;
};
TESSERA_MODULE(CheckpointNet);

enum class Layout {
  Plain,
  Replicate,
  FullyShard,
  FullyShardColumns,  // along the second dimension where there is one
  Hybrid,
  Tp,
  TpPacked,
  TpReplicate,
  TpFullyShard,
};

inline const char* name_of(Layout layout) {
  constexpr const char* kNames[] = {"Plain",       "Replicate", "FullyShard", "FullyShardColumns",
                                    "Hybrid",      "Tp",        "TpPacked",   "TpReplicate",
                                    "TpFullyShard"};
  return kNames[static_cast<size_t>(layout)];
}

/// The same weights on every rank and device and for every layout of a seed.
inline CheckpointNet make_checkpoint_net(Layout layout, uint64_t seed = 11,
                                         c10::Device device = torch::kCPU) {
  auto net = seeded(seed, [] { return CheckpointNet(); });
  net->to(device);
  if (layout == Layout::Plain) return net;  // also where there is no world
  const auto shard_all = [&](const FullyShardOptions& options) {
    fully_shard(net->qkv, options);
    fully_shard(net->out, options);
    fully_shard(net, options);
  };
  const auto tensor_parallel = [&](const DeviceMesh& mesh) {
    parallelize_module(net, mesh,
                       {{"qkv", ColwiseParallel({.packed = 3})}, {"out", RowwiseParallel()}});
  };
  const auto two = [&](int64_t inner) {
    return init_device_mesh(device.type(), {world_size() / inner, inner}, {"dp", "tp"});
  };
  const int64_t inner = world_size() % 2 == 0 ? 2 : 1;
  switch (layout) {
    case Layout::Plain:
      break;
    case Layout::Replicate:
      replicate(net);
      break;
    case Layout::FullyShard:
      shard_all({});
      break;
    case Layout::FullyShardColumns:
      shard_all({.shard_placement_fn = [](const at::Tensor& parameter) -> std::optional<Placement> {
        return Shard(parameter.dim() > 1 && parameter.size(1) % world_size() == 0 ? 1 : 0);
      }});
      break;
    case Layout::Hybrid:
      shard_all({.strategy = ShardingStrategy::HYBRID_SHARD,
                 .mesh = init_device_mesh(device.type(), {inner, world_size() / inner},
                                          {"copies", "shards"})});
      break;
    case Layout::Tp:
      parallelize_module(net, two(world_size())["tp"],
                         {{"in", ColwiseParallel({.output_layouts = Replicate()})},
                          {"out", RowwiseParallel({.input_layouts = Replicate()})}});
      break;
    case Layout::TpPacked:
      tensor_parallel(two(world_size())["tp"]);
      break;
    case Layout::TpReplicate: {
      const auto mesh = two(inner);
      tensor_parallel(mesh["tp"]);
      break;
    }
    case Layout::TpFullyShard: {
      const auto mesh = two(inner);
      tensor_parallel(mesh["tp"]);
      shard_all({.mesh = mesh["dp"]});
      break;
    }
  }
  return net;
}

}  // namespace tessera::testing
