// RMSNorm, rotary embeddings, grouped-query attention and SwiGLU against their formulas.
#include <tessera/autocast.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/state_dict.h>

#include "compose/on_device.h"
#include "nn/decoder_formulas.h"
#include "support/message_of.h"
#include "support/peer.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr Tolerance kExact{1e-12, 1e-12};

class DecoderLayers : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCpu, DecoderLayers,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {1})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, DecoderLayers, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

at::Tensor drawn(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return drawn_on_device(sizes, seed).to(dtype);
}

template <class M>
M in_double(M module) {
  module->to(run_device(), at::kDouble);
  return module;
}

/// Values and the gradients of all parameters and of x, of two ways to compute one thing.
template <class Ours, class Formula>
void expect_same_gradients(torch::nn::Module& module, const at::Tensor& x, const Ours& ours,
                           const Formula& formula) {
  auto inputs = module.parameters();
  inputs.push_back(x.detach().requires_grad_());
  const auto y = ours(inputs.back()), expected = formula(inputs.back());
  expect_equal(y.detach(), expected.detach(), "value", kExact);
  const auto upstream = drawn(y.sizes(), 99, y.scalar_type());
  const auto got = torch::autograd::grad({y}, inputs, {upstream});
  const auto wanted = torch::autograd::grad({expected}, inputs, {upstream});
  for (size_t i = 0; i < inputs.size(); ++i)
    expect_equal(got[i], wanted[i], "gradient " + std::to_string(i), kExact);
}

TEST_P(DecoderLayers, RmsNormIsItsFormula) {
  run([] {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{8}, {3, 8}}) {
      auto norm = in_double(nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = shape, .eps = 0.1}));
      {
        const at::NoGradGuard no_grad;
        norm->weight.copy_(drawn(shape, 2));
      }
      expect_same_gradients(
          *norm, drawn({4, 3, 8}, 1), [&](const auto& x) { return norm(x); },
          [&](const auto& x) { return rms_norm_formula(x, shape, norm->weight, 0.1); });
    }
  });
}

TEST_P(DecoderLayers, RmsNormTakesTheEpsilonOfTheDtype) {
  run([] {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const double eps = dtype == at::kFloat ? std::numeric_limits<float>::epsilon()
                                             : std::numeric_limits<double>::epsilon();
      auto norm = nn::RMSNorm(nn::RMSNormOptions{{8}, std::nullopt, false});
      EXPECT_TRUE(norm->parameters().empty());
      // As small as the root of it, so that it counts.
      const auto x = drawn({4, 8}, 1, dtype) * std::sqrt(eps);
      expect_equal(norm(x), rms_norm_formula(x, {8}, {}, eps), "", tolerance_of(dtype));
    }
  });
}

TEST_P(DecoderLayers, RotaryTablesAreCosinesAndSinesOfTheAngles) {
  run([] {
    auto rotary = on_device(nn::RotaryEmbedding(
        nn::RotaryEmbeddingOptions{.head_dim = 6, .base = 500, .max_position = 20}));
    const auto [cos, sin] = rotary(drawn({2, 4, 20, 6}, 1));
    ASSERT_EQ(cos.sizes(), (std::vector<int64_t>{20, 3}));
    EXPECT_EQ(cos.scalar_type(), at::kDouble);
    const auto host_cos = cos.cpu(), host_sin = sin.cpu();
    for (int64_t position = 0; position < 20; ++position) {
      for (int64_t i = 0; i < 3; ++i) {
        const double angle = position * std::pow(500.0, -2.0 * i / 6);
        EXPECT_NEAR(host_cos[position][i].item<double>(), std::cos(angle), 1e-5);
        EXPECT_NEAR(host_sin[position][i].item<double>(), std::sin(angle), 1e-5);
      }
    }
  });
}

TEST_P(DecoderLayers, RotaryTurnsPairsAsComplexNumbers) {
  run([] {
    const auto x = drawn({2, 3, 5, 8}, 1), angles = drawn({5, 4}, 2);
    const auto turn = at::polar(at::ones_like(angles), angles);
    const auto halves = at::complex(x.narrow(-1, 0, 4), x.narrow(-1, 4, 4)) * turn;
    expect_equal(nn::apply_rotary(x, angles.cos(), angles.sin()),
                 at::cat({at::real(halves), at::imag(halves)}, -1), "halves", kExact);
    const auto neighbours = at::view_as_complex(x.view({2, 3, 5, 4, 2})) * turn;
    expect_equal(nn::apply_rotary(x, angles.cos(), angles.sin(), /*interleaved=*/true),
                 at::view_as_real(neighbours).reshape(x.sizes()), "neighbours", kExact);
  });
}

TEST_P(DecoderLayers, RotaryKeepsTheDtypeOfItsInput) {
  run([] {
    auto rotary = on_device(nn::RotaryEmbedding(8));
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble})
      EXPECT_EQ(rotary->rotate(drawn({2, 3, 5, 8}, 1, dtype)).scalar_type(), dtype);
    const auto x = drawn({5, 8}, 1, at::kBFloat16);
    EXPECT_EQ(
        nn::apply_rotary(x, rotary->cos.narrow(0, 0, 5), rotary->sin.narrow(0, 0, 5)).scalar_type(),
        at::kBFloat16);
  });
}

TEST_P(DecoderLayers, RotaryTakesPositions) {
  run([] {
    for (const bool interleaved : {false, true}) {
      auto rotary = on_device(nn::RotaryEmbedding(nn::RotaryEmbeddingOptions{
          .head_dim = 8, .max_position = 16, .interleaved = interleaved}));
      const auto x = drawn({2, 3, 16, 8}, 1, at::kFloat);
      const auto all = rotary->rotate(x);
      const auto some = at::tensor({3, 0, 11}, at::kLong).to(run_device());
      expect_bitwise_equal(rotary->rotate(x.index_select(2, some), some), all.index_select(2, some),
                           "one list of positions");
      const auto rows = at::tensor({3, 0, 11, 5, 5, 1}, at::kLong).view({2, 3}).to(run_device());
      const auto got = rotary->rotate(
          at::stack({x[0].index_select(1, rows[0]), x[1].index_select(1, rows[1])}), rows);
      for (int64_t i = 0; i < 2; ++i)
        expect_bitwise_equal(got[i], all[i].index_select(1, rows[i]), "a list for each sample");
    }
  });
}

TEST_P(DecoderLayers, AttentionIsItsFormula) {
  run([] {
    for (const bool causal : {false, true}) {
      for (const int64_t kv_heads : {1, 2, 4}) {
        auto attention = in_double(seeded(1, [&] {
          return nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{.d_model = 12,
                                                                            .heads = 4,
                                                                            .kv_heads = kv_heads,
                                                                            .head_dim = 6,
                                                                            .qkv_bias = true,
                                                                            .rotary_base = 100,
                                                                            .max_position = 32,
                                                                            .causal = causal});
        }));
        expect_same_gradients(
            *attention, drawn({2, 7, 12}, 1), [&](const auto& x) { return attention(x); },
            [&](const auto& x) { return attention_formula(*attention, x); });
      }
    }
  });
}

TEST_P(DecoderLayers, AttentionTakesTablesThatLayersShare) {
  run([] {
    const nn::GroupedQueryAttentionOptions own{.d_model = 16, .heads = 4, .kv_heads = 2};
    auto plain = own;
    plain.rotary_base = std::nullopt;
    auto alone = seeded(1, [&] { return on_device(nn::GroupedQueryAttention(own)); });
    auto given = seeded(1, [&] { return on_device(nn::GroupedQueryAttention(plain)); });
    EXPECT_TRUE(given->buffers().empty());
    auto rotary = on_device(nn::RotaryEmbedding(4));
    const auto x = drawn({2, 5, 16}, 1, at::kFloat);
    const auto [cos, sin] = rotary(x.unsqueeze(1));
    expect_bitwise_equal(given(x, cos, sin).detach(), alone(x).detach());
    EXPECT_FALSE(at::allclose(given(x), alone(x))) << "without any it does not turn";
  });
}

TEST_P(DecoderLayers, SwiGluIsItsFormula) {
  run([] {
    auto mlp = in_double(seeded(1, [] { return nn::SwiGLU(6, 10); }));
    expect_same_gradients(
        *mlp, drawn({2, 3, 6}, 1), [&](const auto& x) { return mlp(x); },
        [&](const auto& x) { return swiglu_formula(*mlp, x); });
    auto biased = nn::SwiGLU(nn::SwiGLUOptions{.d_model = 6, .hidden = 10, .bias = true});
    EXPECT_EQ(biased->parameters().size(), 6U);
  });
}

TEST_P(DecoderLayers, TwoLayersOfQwenAreTheirFormulas) {
  run([] {
    auto decoder = in_double(seeded(1, [] { return Decoder(DecoderSizes{}); }));
    expect_same_gradients(
        *decoder, drawn({2, 9, 32}, 1), [&](const auto& x) { return decoder(x); },
        [&](const auto& x) { return decoder_formula(*decoder, x); });
  });
}

TEST_P(DecoderLayers, TwoLayersOfQwenInBf16AreNearThoseInDouble) {
  run([] {
    auto exact = in_double(seeded(1, [] { return Decoder(DecoderSizes{}); }));
    auto low = seeded(1, [] { return on_device(Decoder(DecoderSizes{})); });
    const auto x = drawn({2, 9, 32}, 1, at::kBFloat16);
    const auto expected = exact(x.to(at::kDouble)).detach();
    {
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      expect_equal(low(x).detach().to(at::kDouble), expected, "autocast", Tolerance{0.05, 0.05});
    }
    low->to(at::kBFloat16);
    const auto y = low(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    expect_equal(y.detach().to(at::kDouble), expected, "bf16", Tolerance{0.05, 0.05});
  });
}

TEST_P(DecoderLayers, BuiltWithoutMemoryTheyStartAsOtherwise) {
  run([] {
    auto decoder = [] {
      const MetaInit without_memory;
      return Decoder(DecoderSizes{});
    }();
    fully_shard(decoder, {.mesh = DeviceMesh(run_device().type(), at::arange(1))});
    const auto norm = DTensor::of(decoder->norm->weight).full_tensor().detach();
    expect_bitwise_equal(norm, at::ones({32}, at::TensorOptions(run_device())), "weight");
    const auto& rotary = *decoder->layers->ptr(1)->as<DecoderLayerImpl>()->self_attn->rotary_emb;
    auto expected = on_device(nn::RotaryEmbedding(rotary.options));
    expect_equal(rotary.cos, expected->cos, "cos");
    expect_equal(rotary.sin, expected->sin, "sin");
  });
}

TEST(DecoderLayerModules, HaveTheNamesOfHuggingFace) {
  Decoder decoder(DecoderSizes{});
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state_dict(*decoder->layers->ptr(0))) names.push_back(name);
  EXPECT_THAT(names, UnorderedElementsAre("input_layernorm.weight", "self_attn.q_proj.weight",
                                          "self_attn.q_proj.bias", "self_attn.k_proj.weight",
                                          "self_attn.k_proj.bias", "self_attn.v_proj.weight",
                                          "self_attn.v_proj.bias", "self_attn.o_proj.weight",
                                          "post_attention_layernorm.weight", "mlp.gate_proj.weight",
                                          "mlp.up_proj.weight", "mlp.down_proj.weight"));
}

TEST(DecoderLayerModules, CanBeHookedAndCloned) {
  auto attention = nn::GroupedQueryAttention(
      nn::GroupedQueryAttentionOptions{.d_model = 16, .heads = 4, .kv_heads = 2});
  const auto x = at::randn({2, 5, 16});
  auto copy = clone_module(attention);
  expect_bitwise_equal(copy(x).detach(), attention(x).detach(), "clone");
  EXPECT_FALSE(copy->q_proj->weight.is_alias_of(attention->q_proj->weight));
  EXPECT_FALSE(is_persistent(copy->rotary_emb->cos));
  std::vector<std::string> seen;
  const auto watch = [&](auto& module, std::string name) {
    EXPECT_TRUE(is_hookable(module)) << name;
    register_forward_hook(module, [&seen, name](auto&, auto&, auto&) { seen.push_back(name); });
  };
  watch(copy, "attention");
  watch(copy->rotary_emb, "rotary");
  watch(copy->o_proj, "o_proj");
  copy(x);
  EXPECT_THAT(seen, ElementsAre("rotary", "o_proj", "attention"));

  auto norm = nn::RMSNorm(4);
  auto mlp = nn::SwiGLU(4, 8);
  expect_bitwise_equal(clone_module(mlp)(x.narrow(2, 0, 4)).detach(),
                       mlp(x.narrow(2, 0, 4)).detach(), "clone of SwiGLU");
  nn::Sequential net(norm, mlp);
  EXPECT_EQ(net->forward(x.narrow(2, 0, 4)).sizes(), (std::vector<int64_t>{2, 5, 4}));
}

TEST(DecoderLayerModules, PrintTheirOptions) {
  const auto printed = [](const auto& module) {
    std::ostringstream text;
    text << module;
    return text.str();
  };
  EXPECT_THAT(printed(nn::RMSNorm(nn::RMSNormOptions{{3, 4}, 1e-6})),
              HasSubstr("RMSNorm([3, 4], eps=1e-06, elementwise_affine=true)"));
  EXPECT_THAT(printed(nn::RotaryEmbedding(8)), HasSubstr("RotaryEmbedding(head_dim=8, base=10000"));
  EXPECT_THAT(printed(nn::GroupedQueryAttention(
                  nn::GroupedQueryAttentionOptions{.d_model = 16, .heads = 4, .kv_heads = 2})),
              HasSubstr("GroupedQueryAttention(d_model=16, heads=4, kv_heads=2, head_dim=4"));
}

TEST(DecoderLayerErrors, NameWhatWasExpected) {
  using Attention = nn::GroupedQueryAttentionOptions;
  const auto attention = [](Attention options) {
    return message_of([&] { nn::GroupedQueryAttention made(options); });
  };
  EXPECT_THAT(attention({.d_model = 16, .heads = 4, .kv_heads = 3}),
              HasSubstr("expected heads to be a multiple of kv_heads, got 4 and 3"));
  EXPECT_THAT(attention({.d_model = 18, .heads = 4, .kv_heads = 2}),
              HasSubstr("expected d_model to be a multiple of heads, got 18 and 4"));
  EXPECT_THAT(message_of([] { nn::RMSNorm made(nn::RMSNormOptions{}); }),
              HasSubstr("RMSNorm: expected a normalized_shape of at least one dimension"));
  EXPECT_THAT(message_of([] { nn::RotaryEmbedding made(7); }),
              HasSubstr("RotaryEmbedding: expected an even head_dim above 0, got 7"));
  EXPECT_THAT(message_of([] {
                nn::RotaryEmbedding made(nn::RotaryEmbeddingOptions{.head_dim = 4, .base = 0});
              }),
              HasSubstr("RotaryEmbedding: expected base and max_position above 0"));
  nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.head_dim = 4, .max_position = 3});
  EXPECT_THAT(message_of([&] { rotary(at::zeros({5, 4})); }),
              HasSubstr("expected a length of at most max_position (3), got 5"));
  EXPECT_THAT(message_of([&] { rotary(at::zeros({2, 4}), at::zeros({1, 1, 2}, at::kLong)); }),
              HasSubstr("expected positions of [length] or [batch, length], got [1, 1, 2]"));
  EXPECT_THAT(message_of([&] { nn::apply_rotary(at::zeros({2, 6}), rotary->cos, rotary->sin); }),
              HasSubstr("apply_rotary: expected cos and sin of [length, head_dim / 2]"));
  nn::GroupedQueryAttention made(Attention{.d_model = 4, .heads = 2, .kv_heads = 1});
  EXPECT_THAT(message_of([&] { made(at::zeros({3, 4})); }),
              HasSubstr("expected an x of [batch, length, 4], got [3, 4]"));
  EXPECT_THAT(message_of([&] { made(at::zeros({1, 3, 4}), at::zeros({3, 1})); }),
              HasSubstr("expected both cos and sin, or neither"));
}

TEST(DecoderLayersPeer, RmsNormIsPythonsBitForBit) {
  if (auto reason = peer_missing()) GTEST_SKIP() << *reason;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto x = (seeded(1, [] { return at::randn({5, 8}); }) * 1e-3).to(dtype).requires_grad_();
    auto norm = nn::RMSNorm(8);
    norm->to(dtype);
    const auto python = run_peer(R"(
norm = torch.nn.RMSNorm(8, dtype=inputs["x"].dtype)
x = inputs["x"].detach().requires_grad_()
y = norm(x)
y.square().sum().backward()
outputs.update(y=y.detach(), x=x.grad, weight=norm.weight.grad)
)",
                                 {{"x", x.detach()}});
    ASSERT_TRUE(python.ok());
    const auto y = norm(x);
    y.square().sum().backward();
    expect_bitwise_equal(y.detach(), python["y"], "y");
    expect_bitwise_equal(x.grad(), python["x"], "x");
    expect_bitwise_equal(norm->weight.grad(), python["weight"], "weight");
  }
}

}  // namespace
}  // namespace tessera::testing
