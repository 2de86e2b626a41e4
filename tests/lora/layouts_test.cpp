// Adapters over several ranks: what comes out is what one process gets.
#include <tessera/fully_shard.h>
#include <tessera/lora.h>
#include <tessera/models.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "counted_memory.h"
#include "lora/adapted_models.h"
#include "models/small_models.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"
#include "support/whole.h"

#include <vector>

namespace tessera::testing {
namespace {

class LoraLayouts : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCpu, LoraLayouts, ::testing::ValuesIn(cpu_backends()), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, LoraLayouts, ::testing::ValuesIn(cuda_backends()), backend_name);

using Spread = std::function<void(AdaptedNet&)>;

AdaptedNet adapted_net(const Spread& before = {}) {
  auto net = on_device(seeded(5, [] { return AdaptedNet(); }));
  if (before) before(net);
  lora(net, small_lora());
  draw_adapters(net);
  return net;
}

/// Rows of the batch that are this rank's.
at::Tensor own_rows(const at::Tensor& batch, int64_t ranks, int64_t rank) {
  return batch.chunk(ranks)[static_cast<size_t>(rank)];
}

/// Three steps of SGD on the same rows; then values, outputs, and merged ones.
void expect_as_one_process(AdaptedNet& net, int64_t data_ranks, int64_t data_rank) {
  auto reference = adapted_net();
  torch::optim::SGD ours(lora_parameters(net), 0.3), theirs(lora_parameters(reference), 0.3);
  for (uint64_t step = 0; step < 3; ++step) {
    const auto batch = drawn_on_device({12, 12}, step);
    for (auto* optimizer : {&ours, &theirs}) optimizer->zero_grad();
    net(own_rows(batch, data_ranks, data_rank)).square().mean().backward();
    reference(batch).square().mean().backward();
    for (auto* optimizer : {&ours, &theirs}) optimizer->step();
  }
  const auto expected = lora_state_dict(reference), got = lora_state_dict(net);
  for (const auto& [name, value] : expected) expect_near(*got.find(name), value, 2e-5, name);
  const auto x = drawn_on_device({12, 12}, 9);
  net->eval(), reference->eval();
  const at::Tensor output = reference(x).detach();
  expect_near(net(x), output, 5e-5, "output");
  merge_lora(net);
  merge_lora(reference);
  expect_near(whole(net->first->up->weight), reference->first->up->weight, 2e-5, "merged up");
  expect_near(whole(net->second->down->weight), reference->second->down->weight, 2e-5, "and down");
  expect_near(net(x), output, 5e-5, "merged output");
  unmerge_lora(net);
  expect_near(net(x), output, 5e-5, "unmerged output");
}

TEST_P(LoraLayouts, ReplicatedAsOne) {
  for (const int ranks : {2, 3})
    run(ranks, [] {
      auto net = adapted_net();
      replicate(net);
      expect_as_one_process(net, world_size(), rank());
    });
}

/// Units in which frozen and trained parameters lie together; uneven shards on three ranks.
TEST_P(LoraLayouts, FullyShardedAsOne) {
  for (const int ranks : {2, 3})
    run(ranks, [] {
      auto net = adapted_net();
      fully_shard(net->first);
      fully_shard(net->second);
      fully_shard(net);
      expect_as_one_process(net, world_size(), rank());
    });
}

/// Widths that do not divide evenly among three ranks.
void parallelize(AdaptedNet& net, const DeviceMesh& mesh) {
  parallelize_module(net, mesh, {{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}});
}

TEST_P(LoraLayouts, TensorParallelAsOne) {
  for (const int ranks : {2, 3})
    run(ranks, [] {
      auto net = adapted_net([](AdaptedNet& made) {
        parallelize(made, init_device_mesh(run_device().type(), {world_size()}));
      });
      expect_as_one_process(net, 1, 0);
    });
}

TEST_P(LoraLayouts, BothAsOne) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    auto net = adapted_net([&](AdaptedNet& made) { parallelize(made, mesh["tp"]); });
    for (const auto& block : {net->first, net->second}) fully_shard(block, {.mesh = mesh["dp"]});
    fully_shard(net, {.mesh = mesh["dp"]});
    expect_as_one_process(net, 2, mesh.local_rank("dp"));
  });
}

TEST_P(LoraLayouts, KeepPackedRowsInTheirOrderInFiles) {
  const TemporaryFolder folder;
  run(2, [&] {
    auto net = on_device(seeded(5, [] { return nn::Sequential(nn::Linear(6, 12)); }));
    parallelize_module(net, init_device_mesh(run_device().type(), {2}),
                       {{"0", ColwiseParallel({.output_layouts = Replicate(), .packed = 3})}});
    lora(net, {.rank = 2});
    StateDict dict = {{"0.lora_A.weight", drawn_on_device({2, 6}, 1)},
                      {"0.lora_B.weight", drawn_on_device({12, 2}, 2)}};
    load_lora_state_dict(net, dict);
    EXPECT_TRUE(at::equal(lora_state_dict(net)["0.lora_B.weight"], dict["0.lora_B.weight"]));
    const auto x = drawn_on_device({3, 6}, 3);
    auto plain = on_device(seeded(5, [] { return nn::Sequential(nn::Linear(6, 12)); }));
    lora(plain, {.rank = 2});
    load_lora_state_dict(plain, dict);
    expect_near(unpack_rows(net->forward(x).t(), 3, 2).t(), plain->forward(x), 1e-5, "output");
  });
}

/// Gathered weights are freed, and there is no buffer for gradients of what is frozen.
TEST(LoraLayoutsMemoryOnThreads, FrozenShardsHaveNoGradients) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return AdaptedNet(256, 1024); });
    lora(net, {.rank = 4, .targets = {"up", "down"}});
    size_t base = 0;
    for (const auto& parameter : net->parameters()) base += parameter.nbytes();
    fully_shard(net->first);
    fully_shard(net->second);
    fully_shard(net);
    const auto x = at::randn({2, 256});
    net(x).square().mean().backward();
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    net(x).square().mean().backward();
    size_t gradients = 0;
    for (const auto& item : net->named_parameters()) {
      const auto& gradient = item.value().grad();
      EXPECT_EQ(gradient.defined(), item.key().find(".lora_") != std::string::npos) << item.key();
      if (gradient.defined()) gradients += DTensor::of(gradient).to_local().nbytes();
    }
    EXPECT_LE(gradients, 4 * 4 * (256 + 1024) * sizeof(float) / 2);
    EXPECT_GT(base, 100 * gradients);
  });
}

TEST(LoraLayoutErrorsOnThreads, ComeLate) {
  run_threads(2, [] {
    const auto expect_part = [](const std::string& message, const std::string& part) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    };
    auto sharded = seeded(5, [] { return AdaptedNet(); });
    fully_shard(sharded);
    expect_part(message_of([&] { lora(sharded); }), "call lora first, then fully_shard");
    expect_part(message_of([&] { lora(sharded->first); }), "call lora first, then fully_shard");
    auto replicated = seeded(5, [] { return AdaptedNet(); });
    replicate(replicated);
    expect_part(message_of([&] { lora(replicated); }), "call lora first, then replicate");
    replicated(at::ones({1, 12}));
    expect_part(message_of([&] { lora(replicated->first); }), "call lora first, then replicate");
    auto adapted = seeded(5, [] { return AdaptedNet(); });
    lora(adapted, small_lora());
    const auto mesh = init_device_mesh(at::kCPU, {2});
    expect_part(message_of([&] { parallelize(adapted, mesh); }),
                "call parallelize_module first, then lora");
    fully_shard(adapted);
    expect_part(message_of([&] { remove_lora(adapted); }), "without fully_shard");
  });
}

/// A model too large for one rank: built without memory, adapted, sharded, then loaded.
TEST(LoraModelsOnThreads, FromMetaAndIntoFiles) {
  const auto config = small_config(models::Family::Llama, false);
  const TemporaryFolder folder;
  const auto start = (folder.path() / "start").string(),
             merged = (folder.path() / "merged").string(),
             expected = (folder.path() / "expected").string();
  const LoraOptions options{.rank = 2, .alpha = 4, .targets = {"q_proj", "down_proj"}};
  auto reference = small_model(config);
  models::save_pretrained(reference, start);
  lora(reference, options);
  draw_adapters(reference);
  EXPECT_NE(message_of([&] {
              models::save_pretrained(reference, expected);
            }).find("call merge_lora(net) first, or save_lora"),
            std::string::npos);
  const auto loss = reference->loss(small_batch().tokens, small_batch().targets).item<double>();
  reference->eval();
  merge_lora(reference);
  remove_lora(reference);
  models::save_pretrained(reference, expected);
  run_threads(2, [&] {
    auto net = [&] {
      const MetaInit no_memory;
      return models::CausalLM(config);
    }();
    lora(net, options);
    const FullyShardOptions sharding{.param_init_fn = models::param_init_fn(net)};
    for (const auto& block : net->blocks()) fully_shard(block, sharding);
    fully_shard(net, sharding);
    for (const auto& [name, value] : lora_state_dict(net)) {
      if (name.ends_with("lora_B.weight")) {
        EXPECT_EQ(value.abs().max().item<double>(), 0) << name;
      }
    }
    models::load_pretrained(start, net);
    draw_adapters(net);
    const auto batch = small_batch();
    const auto own = net->loss(batch.tokens, batch.targets);
    EXPECT_NEAR(own.item<double>(), loss, 1e-5);
    own.backward();
    net->eval();
    merge_lora(net);
    models::save_pretrained(net, merged);
  });
  expect_same_files(merged, expected);
}

TEST(LoraModelsErrors, OfAHeadThatLossDoesNotCall) {
  auto net = small_model(small_config(models::Family::Llama, false));
  lora(net, {.rank = 2, .targets = {"lm_head"}});
  EXPECT_NE(message_of([&] {
              net->loss(small_batch().tokens, small_batch().targets);
            }).find("leave lm_head out of lora()'s targets"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
