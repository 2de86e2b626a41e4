// Attention whose sequence lies on several ranks, as a function, against one device.
#include <tessera/autocast.h>
#include <tessera/parallelize.h>

#include "compose/on_device.h"
#include "parallel/models.h"
#include "parallel/ring.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <random>

namespace tessera::testing {
namespace {

using Cut = ContextParallelOptions;

DeviceMesh mesh_of_run() { return mesh_of_all(run_device().type()); }

struct AttentionInputs {
  at::Tensor query, key, value;
  std::vector<at::Tensor> all() const { return {query, key, value}; }
};

struct AttentionShape {
  int64_t heads = 4, kv_heads = 4, length = 24, head_dim = 8, value_dim = 8;
};

AttentionInputs draw(const AttentionShape& shape, at::ScalarType dtype) {
  const auto drawn = [&](int64_t heads, int64_t width, uint64_t seed) {
    return drawn_on_device({2, heads, shape.length, width}, seed)
        .to(dtype)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2);  // as projections leave them
  };
  return {drawn(shape.heads, shape.head_dim, 1), drawn(shape.kv_heads, shape.head_dim, 2),
          drawn(shape.kv_heads, shape.value_dim, 3)};
}

AttentionInputs leaves(const AttentionInputs& inputs) {
  const auto leaf = [](const at::Tensor& tensor) { return tensor.detach().requires_grad_(); };
  return {leaf(inputs.query), leaf(inputs.key), leaf(inputs.value)};
}

AttentionInputs cut(const AttentionInputs& inputs, const DeviceMesh& mesh, const Cut& options) {
  const auto part = [&](const at::Tensor& tensor) {
    return context_parallel_shard(tensor, 2, mesh, options);
  };
  return {part(inputs.query), part(inputs.key), part(inputs.value)};
}

struct Attended {
  at::Tensor out;
  std::vector<at::Tensor> gradients;
};

/// Output and gradients of the sum of output times `weights`.
template <class Attend>
Attended attended(const AttentionInputs& inputs, const at::Tensor& weights, Attend attend) {
  const auto out = attend(inputs);
  (out * weights).sum().backward();
  Attended result{out.detach(), {}};
  for (const auto& input : inputs.all()) result.gradients.push_back(input.grad());
  return result;
}

struct RingCase {
  AttentionShape shape;
  at::ScalarType dtype = at::kDouble;
  bool is_causal = true;
  bool load_balance = true;
  Tolerance tolerance = {.rtol = 1e-10, .atol = 1e-10};
};

/// The gradients of all ranks' losses together are those of one device's.
void expect_attention_of_one_device(const RingCase& wanted) {
  const auto mesh = mesh_of_run();
  const bool is_grouped = wanted.shape.heads != wanted.shape.kv_heads;
  const auto whole = leaves(draw(wanted.shape, wanted.dtype));
  const auto weights =
      drawn_on_device({2, wanted.shape.heads, wanted.shape.length, wanted.shape.value_dim}, 4)
          .to(wanted.dtype);
  const auto expected = attended(whole, weights, [&](const AttentionInputs& all) {
    return at::scaled_dot_product_attention(all.query, all.key, all.value, {}, 0, wanted.is_causal,
                                            0.3, is_grouped);
  });
  const Cut options{.load_balance = wanted.load_balance};
  const auto part = [&](const at::Tensor& tensor) {
    return context_parallel_shard(tensor, 2, mesh, options);
  };
  const auto ours =
      attended(leaves(cut(whole, mesh, options)), part(weights), [&](const AttentionInputs& local) {
        return ring_attention(local.query, local.key, local.value,
                              {.mesh = mesh,
                               .is_causal = wanted.is_causal,
                               .scale = 0.3,
                               .enable_gqa = is_grouped,
                               .load_balance = wanted.load_balance});
      });
  SCOPED_TRACE(c10::str(wanted.is_causal ? "causal" : "full",
                        wanted.load_balance ? " balanced" : "", " heads ", wanted.shape.heads, "/",
                        wanted.shape.kv_heads, " length ", wanted.shape.length));
  expect_equal(ours.out, part(expected.out), "output", wanted.tolerance);
  for (size_t i = 0; i < 3; ++i)
    expect_equal(ours.gradients[i], part(expected.gradients[i]), c10::str("gradient ", i),
                 wanted.tolerance);
}

/// Kernels for GPUs multiply fp32 in parts of fewer bits.
Tolerance float_tolerance() {
  return run_device().is_cpu() ? Tolerance{1e-5, 1e-5} : Tolerance{1e-4, 1e-4};
}

class RingAttention : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Every, RingAttention,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm", "gloo"}, {1, 2, 3, 4})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, RingAttention, ::testing::ValuesIn(cuda_cases()), case_name);

TEST_P(RingAttention, IsThatOfOneDevice) {
  run_on(GetParam(), [] {
    for (const bool is_causal : {true, false}) {
      for (const bool load_balance : {true, false}) {
        for (const int64_t kv_heads : {4, 2}) {
          RingCase wanted{.shape = {.kv_heads = kv_heads, .length = 10 * world_size()},
                          .is_causal = is_causal,
                          .load_balance = load_balance};
          expect_attention_of_one_device(wanted);
          wanted.dtype = at::kFloat;
          wanted.tolerance = float_tolerance();
          expect_attention_of_one_device(wanted);
        }
      }
    }
  });
}

TEST_P(RingAttention, IsThatOfOneDeviceInBlocksOfTheKernels) {
  run_on(GetParam(), [] {
    RingCase wanted{.shape = {.heads = 2,
                              .kv_heads = 1,
                              .length = 600 * world_size(),
                              .head_dim = 16,
                              .value_dim = 16}};
    expect_attention_of_one_device(wanted);
    wanted.dtype = at::kBFloat16;
    wanted.tolerance = {.rtol = 3e-2, .atol = 3e-2};
    expect_attention_of_one_device(wanted);
  });
}

class RingAttentionDetails : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, RingAttentionDetails,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, RingAttentionDetails, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(RingAttentionDetails, TakesValuesOfAnotherWidth) {
  run(4, [] {
    for (const bool is_causal : {true, false})
      expect_attention_of_one_device(
          {.shape = {.kv_heads = 2, .length = 12 * world_size(), .value_dim = 5},
           .is_causal = is_causal});
  });
}

TEST_P(RingAttentionDetails, GivesTheSameBitsInEveryRun) {
  run(4, [] {
    const auto mesh = mesh_of_run();
    const auto whole = draw({.length = 16 * world_size()}, at::kFloat);
    const auto once = [&] {
      const auto local = leaves(cut(whole, mesh, {}));
      return attended(local, at::ones_like(local.query), [&](const AttentionInputs& all) {
        return ring_attention(all.query, all.key, all.value, {.mesh = mesh, .is_causal = true});
      });
    };
    const auto first = once(), second = once();
    expect_bitwise_equal(second.out, first.out, "output");
    // GPUs' kernels add gradients up in any order.
    for (size_t i = 0; i < 3 && run_device().is_cpu(); ++i)
      expect_bitwise_equal(second.gradients[i], first.gradients[i], c10::str("gradient ", i));
  });
}

TEST_P(RingAttentionDetails, TakesSequencesWithoutHeadsOrBatch) {
  run(2, [] {
    const MeshScope scope(mesh_of_run());
    const auto whole = drawn_on_device({3, 8, 8}, 1);
    const auto local = context_parallel_shard(whole, 1, *current_mesh());
    const auto expected =
        at::scaled_dot_product_attention(whole, whole, whole, {}, 0, /*is_causal=*/true);
    expect_equal(ring_attention(local, local, local, {.is_causal = true}),
                 context_parallel_shard(expected, 1, *current_mesh()));
    expect_equal(ring_attention(local[0], local[0], local[0], {.is_causal = true}),
                 context_parallel_shard(expected[0], 0, *current_mesh()));
  });
}

TEST_P(RingAttentionDetails, QueriesMayBeFewerThanKeysWithoutAMask) {
  run(2, [] {
    const auto mesh = mesh_of_run();
    const auto queries = drawn_on_device({2, 2, 6, 8}, 1), keys = drawn_on_device({2, 2, 10, 8}, 2);
    const auto part = [&](const at::Tensor& tensor) {
      return context_parallel_shard(tensor, 2, mesh, {.load_balance = false});
    };
    expect_equal(ring_attention(part(queries), part(keys), part(keys), {.mesh = mesh}),
                 part(at::scaled_dot_product_attention(queries, keys, keys)));
  });
}

TEST_P(RingAttentionDetails, DistributedHeadsStayDistributed) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"cp", "tp"});
    const auto whole = draw({.kv_heads = 2, .length = 16}, at::kDouble);
    const auto expected = at::scaled_dot_product_attention(whole.query, whole.key, whole.value, {},
                                                           0, true, std::nullopt, true);
    const auto local = cut(whole, mesh["cp"], {});
    for (const Placement& placement :
         {Placement(Shard(1)), Placement(Shard(0)), Placement(Replicate())}) {
      const auto placed = [&](const at::Tensor& tensor) {
        return distribute_tensor(tensor, mesh["tp"], {placement});
      };
      const auto out = ring_attention(placed(local.query), placed(local.key), placed(local.value),
                                      {.mesh = mesh["cp"], .is_causal = true, .enable_gqa = true});
      ASSERT_TRUE(is_dtensor(out));
      EXPECT_EQ(DTensor::of(out).placements(), Placements{placement});
      expect_equal(full_value(out), context_parallel_shard(expected, 2, mesh["cp"]));
    }
  });
}

TEST_P(RingAttentionDetails, AutocastGivesTheDtypesOfOneDevice) {
  run(2, [] {
    const auto mesh = mesh_of_run();
    const auto whole = draw({.length = 16}, at::kFloat);
    const auto local = leaves(cut(whole, mesh, {}));
    at::Tensor out, expected;
    {
      const Autocast cast(run_device().type(), {.dtype = at::kBFloat16});
      expected = at::scaled_dot_product_attention(whole.query, whole.key, whole.value, {}, 0, true);
      out = ring_attention(local.query, local.key, local.value, {.mesh = mesh, .is_causal = true});
    }
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    expect_equal(out, context_parallel_shard(expected, 2, mesh), "output", Tolerance{3e-2, 3e-2});
    out.sum().backward();
    EXPECT_EQ(local.key.grad().scalar_type(), at::kFloat);
  });
}

TEST_P(RingAttentionDetails, EachStepSendsKeysAndValuesOnce) {
  run(4, [] {
    const auto mesh = mesh_of_run();
    const auto local = leaves(cut(draw({.length = 16}, at::kFloat), mesh, {}));
    comm_debug counted;
    const auto out =
        ring_attention(local.query, local.key, local.value, {.mesh = mesh, .is_causal = true});
    EXPECT_EQ(counted.counts().at("all_to_all").collectives, 3) << counted.to_string();
    out.sum().backward();
    EXPECT_EQ(counted.counts().at("all_to_all").collectives, 3 + 3 + 4) << counted.to_string();
  });
}

TEST_P(RingAttentionDetails, AnyShapeIsThatOfOneDevice) {
  const auto seed = test_seed();
  run(3, [seed] {
    std::mt19937_64 random(seed);
    const auto upto = [&](int64_t most) { return 1 + static_cast<int64_t>(random() % most); };
    for (int draw = 0; draw < 12; ++draw) {
      const int64_t kv_heads = upto(3), head_dim = upto(20);
      expect_attention_of_one_device({.shape = {.heads = kv_heads * upto(3),
                                                .kv_heads = kv_heads,
                                                .length = 2 * world_size() * upto(40),
                                                .head_dim = head_dim,
                                                .value_dim = draw % 3 == 0 ? upto(20) : head_dim},
                                      .is_causal = upto(4) > 1,
                                      .load_balance = upto(2) == 1});
    }
  });
}

// Who computes what.

int64_t scores_of(const parallel::RingLayout& layout, int64_t length) {
  int64_t scores = 0;
  for (int64_t source = 0; source < layout.ranks; ++source) {
    const auto block = ring_block(layout, source, length, length);
    if (!block) continue;
    const auto all = block->queries.length * block->keys.length;
    scores += block->is_causal ? (all + length) / 2 : all;
  }
  return scores;
}

TEST(RingBlocksOnThreads, BalancedRanksDoTheSameWorkAndNoneThatIsHidden) {
  constexpr int64_t kLocal = 12;
  for (const int64_t ranks : {1, 2, 3, 8}) {
    const auto whole = ranks * kLocal;
    for (int64_t rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(scores_of({.rank = rank, .ranks = ranks, .is_causal = true}, kLocal) * ranks,
                whole * (whole + 1) / 2)
          << rank << " of " << ranks;
  }
}

TEST(RingBlocksOnThreads, UnbalancedRanksSkipTheKeysOfLaterOnes) {
  const parallel::RingLayout layout{
      .rank = 1, .ranks = 4, .is_causal = true, .load_balance = false};
  EXPECT_EQ(ring_block(layout, 0, 8, 8)->keys, (dtensor::Chunk{0, 8}));
  EXPECT_TRUE(ring_block(layout, 1, 8, 8)->is_causal);
  EXPECT_FALSE(ring_block(layout, 2, 8, 8));
  EXPECT_FALSE(ring_block(layout, 3, 8, 8));
}

}  // namespace
}  // namespace tessera::testing
