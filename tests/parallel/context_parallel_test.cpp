// Sequences cut for ranks, and modules that see the whole of them, against one device.
#include <tessera/checkpoint.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

DeviceMesh context_mesh() { return mesh_of_all(run_device().type()); }

// How a sequence is cut.

TEST(ContextShardsOnThreads, AreHeadAndTailAndComeBack) {
  run_threads(3, [] {
    const auto mesh = mesh_of_all();
    const auto whole = at::arange(24, at::kDouble).view({2, 12, 1});
    const auto local = context_parallel_shard(whole, 1, mesh);
    const int64_t r = rank();
    const auto places = at::tensor({2 * r, 2 * r + 1, 10 - 2 * r, 11 - 2 * r}, at::kLong);
    EXPECT_TRUE(at::equal(local, whole.index_select(1, places)));
    EXPECT_TRUE(at::equal(context_parallel_positions(4, mesh), places));
    EXPECT_TRUE(at::equal(context_parallel_unshard(local, -2, mesh), whole));
    const ContextParallelOptions plain{.load_balance = false};
    const auto in_order = context_parallel_shard(whole, 1, mesh, plain);
    EXPECT_TRUE(at::equal(in_order, whole.narrow(1, 4 * r, 4)));
    EXPECT_TRUE(at::equal(context_parallel_unshard(in_order, 1, mesh, plain), whole));
    EXPECT_TRUE(
        at::equal(context_parallel_positions(4, mesh, plain), at::arange(4 * r, 4 * r + 4)));
  });
}

TEST(ContextShardsOnThreads, AreDifferentiable) {
  run_threads(2, [] {
    const auto mesh = mesh_of_all();
    const auto whole = at::arange(8, at::kDouble).requires_grad_();
    const auto local = context_parallel_shard(whole, 0, mesh);
    const auto weights = at::arange(8, at::kDouble) + 1;
    (context_parallel_unshard(local, 0, mesh) * weights).sum().backward();
    // Both ranks' losses count, each rank's part alone is its own.
    expect_equal(all_reduce(whole.grad()), 2 * weights);
    expect_equal(context_parallel_shard(whole.grad(), 0, mesh),
                 context_parallel_shard(2 * weights, 0, mesh));
  });
}

// Modules.

constexpr int64_t kFeatures = 16, kSamples = 2;

/// Attention of one's own, with positions that it adds.
struct OwnAttentionImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto placed = x + places(at::arange(x.size(1), x.options().dtype(at::kLong)));
    const auto parts = qkv(placed).unflatten(-1, {3, 4, -1}).unbind(-3);
    const auto heads = [&](int64_t i) { return parts[i].transpose(1, 2); };
    return out(torch::scaled_dot_product_attention(heads(0), heads(1), heads(2), {}, 0,
                                                   /*is_causal=*/true)
                   .transpose(1, 2)
                   .flatten(2));
  }
  nn::Embedding places{register_module("places", nn::Embedding(64, kFeatures))};
  nn::Linear qkv{register_module("qkv", nn::Linear(kFeatures, 3 * kFeatures))};
  nn::Linear out{register_module("out", nn::Linear(kFeatures, kFeatures))};
};
TESSERA_MODULE(OwnAttention, "x");

/// rotate() of tables that are shared.
struct RotatedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = x.unflatten(-1, {2, 8}).transpose(1, 2);
    const auto turned = rotary->rotate(heads);
    return at::scaled_dot_product_attention(turned, turned, heads, {}, 0, /*is_causal=*/true)
        .transpose(1, 2)
        .flatten(2);
  }
  nn::RotaryEmbedding rotary{register_module("rotary", nn::RotaryEmbedding(8))};
};
TESSERA_MODULE(Rotated, "x");

nn::GroupedQueryAttention grouped(bool is_causal = true) {
  return nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{
      .d_model = kFeatures, .heads = 4, .kv_heads = 2, .max_position = 64, .causal = is_causal});
}

/// Output, the gradient of the input and averaged gradients of parameters are those of one device.
template <class M>
void expect_module_of_one_device(const std::pair<M, M>& twins, const DeviceMesh& mesh,
                                 const ContextParallelOptions& options = {}) {
  auto [plain, parallel] = twins;
  const auto x = drawn_on_device({kSamples, 24, kFeatures}, 8).to(at::kDouble).requires_grad_();
  const auto weights = drawn_on_device({kSamples, 24, kFeatures}, 9).to(at::kDouble);
  const auto expected = plain(x);
  (expected * weights).mean().backward();
  const auto part = [&](const at::Tensor& tensor) {
    return context_parallel_shard(tensor, 1, mesh, options);
  };
  const auto local = part(x.detach()).requires_grad_();
  const auto out = parallel(local);
  expect_equal(out, part(expected), "output");
  (out * part(weights)).mean().backward();
  expect_equal(local.grad() / mesh.size(), part(x.grad()), "gradient of the input");
  const auto gradients = parallel->named_parameters();
  for (const auto& item : plain->named_parameters())
    expect_equal(full_value(gradients[item.key()].grad()), item.value().grad(), item.key());
}

template <class Make>
auto double_twins(Make make) {
  const auto one = [&] {
    auto module = seeded(5, make);
    module->to(torch::kDouble);
    return on_device(module);
  };
  auto first = one();
  return std::pair(std::move(first), one());
}

class ContextParallelModules : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Every, ContextParallelModules,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm", "gloo"}, {2, 3})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ContextParallelModules, ::testing::ValuesIn(cuda_cases()),
                         case_name);

TEST_P(ContextParallelModules, GroupedQueryAttentionWithItsOwnTables) {
  run_on(GetParam(), [] {
    for (const bool is_causal : {true, false}) {
      for (const bool load_balance : {true, false}) {
        const ContextParallelOptions options{.load_balance = load_balance};
        auto twins = double_twins([&] { return grouped(is_causal); });
        parallelize_module(twins.second, context_mesh(), ContextParallel(options));
        replicate(twins.second);
        expect_module_of_one_device(twins, context_mesh(), options);
      }
    }
  });
}

TEST_P(ContextParallelModules, AttentionOfOnesOwnWithLearnedPositions) {
  run_on(GetParam(), [] {
    auto twins = double_twins([] { return OwnAttention(); });
    parallelize_module(twins.second, context_mesh(),
                       {{"", ContextParallel()}, {"places", ContextParallel()}});
    replicate(twins.second);
    expect_module_of_one_device(twins, context_mesh());
  });
}

class ContextParallelComposed : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, ContextParallelComposed,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ContextParallelComposed, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(ContextParallelComposed, RotateFollows) {
  run(2, [] {
    auto twins = double_twins([] { return Rotated(); });
    parallelize_module(twins.second, context_mesh(), ContextParallel());
    expect_module_of_one_device(twins, context_mesh());
  });
}

TEST_P(ContextParallelComposed, AttentionIsLocalAgainAfterwards) {
  run(2, [] {
    auto module = on_device(seeded(5, [] { return grouped(); }));
    parallelize_module(module, context_mesh(), ContextParallel());
    const auto x = drawn_on_device({kSamples, 4, kFeatures}, 8);
    module(x);
    const auto heads = x.unsqueeze(1);
    comm_debug counted;
    at::scaled_dot_product_attention(heads, heads, heads, {}, 0, true);
    EXPECT_THROW(module(x[0]), c10::ValueError) << "of two dimensions";
    at::scaled_dot_product_attention(heads, heads, heads, {}, 0, true);
    EXPECT_EQ(counted.counts().count("all_to_all"), 0U) << counted.to_string();
  });
}

TEST_P(ContextParallelComposed, CheckpointsRunTheRingAgain) {
  run(2, [] {
    auto twins = double_twins([] { return grouped(); });
    parallelize_module(twins.second, context_mesh(), ContextParallel());
    checkpoint(twins.second);
    replicate(twins.second);
    expect_module_of_one_device(twins, context_mesh());
  });
}

/// What is computed again outside of the module's forward would see this rank's tokens alone.
TEST_P(ContextParallelComposed, CheckpointsInsideOfTheModuleAreRefused) {
  run(2, [] {
    nn::Sequential net;
    net->push_back("attention", seeded(5, [] { return grouped(); }));
    on_device(net);
    parallelize_module(net, context_mesh(), ContextParallel());
    checkpoint(net->ptr(0));
    const auto out = net(drawn_on_device({kSamples, 8, kFeatures}, 8)).sum();
    EXPECT_THAT(message_of<c10::Error>([&] { out.backward(); }),
                ::testing::HasSubstr("the recomputation did not repeat the forward"));
  });
}

TEST_P(ContextParallelComposed, HeadsOnOtherRanks) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"cp", "tp"});
    auto twins = double_twins([] { return grouped(); });
    parallelize_module(twins.second, mesh["tp"],
                       {{"q_proj", ColwiseParallel({.heads = 4})},
                        {"[kv]_proj", ColwiseParallel({.heads = 2})},
                        {"o_proj", RowwiseParallel({.heads = 4})}});
    parallelize_module(twins.second, mesh["cp"], ContextParallel());
    replicate(twins.second, {.mesh = mesh["cp"]});
    expect_module_of_one_device(twins, mesh["cp"]);
  });
}

}  // namespace
}  // namespace tessera::testing
