// Adapters in one process: what they compute, what is trained, what it costs.
#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/lora.h>
#include <tessera/optim.h>

#include "compose/on_device.h"
#include "counted_memory.h"
#include "lora/adapted_models.h"
#include "support/message_of.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace tessera::testing {
namespace {

class Lora : public OnBackends {
 protected:
  void alone(const RankBody& body) { run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCpu, Lora, ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {1})),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, Lora, ::testing::ValuesIn(cuda_cases({"shm"}, {1})), backend_name);

AdaptedNet made_net(uint64_t seed = 5) {
  return on_device(seeded(seed, [] { return AdaptedNet(); }));
}

at::Tensor formula(FeedForward& block, const at::Tensor& x, double scale) {
  const auto layer = [&](nn::Linear& linear, const at::Tensor& input) {
    const auto named = linear->named_parameters();
    return at::linear(input, linear->weight, linear->bias) +
           at::matmul(at::matmul(input, named["lora_A.weight"].t()), named["lora_B.weight"].t()) *
               scale;
  };
  return x + layer(block->down, at::gelu(layer(block->up, x)));
}

TEST_P(Lora, AddsNothingAtFirstAndThenTheScaledProduct) {
  alone([] {
    for (const bool rslora : {false, true}) {
      auto net = made_net();
      const auto x = drawn_on_device({7, 12}, 1);
      const at::Tensor before = net(x).detach();
      auto options = small_lora();
      options.rslora = rslora;
      lora(net, options);
      EXPECT_TRUE(at::equal(net(x), before));
      draw_adapters(net);
      const auto scale = rslora ? 6 / std::sqrt(3.0) : 2.0;
      const auto expected =
          net->head(net->norm(formula(net->second, formula(net->first, x, scale), scale)));
      expect_near(net(x), expected, 1e-5, "output");
      EXPECT_GT((net(x) - before).abs().max().item<double>(), 0.1);
    }
  });
}

TEST_P(Lora, KeepsNamesAndTrainsAdaptersAlone) {
  alone([] {
    auto net = made_net();
    std::set<std::string> names;
    for (const auto& item : net->named_parameters()) names.insert(item.key());
    lora(net, small_lora());
    std::set<std::string> trained;
    for (const auto& item : net->named_parameters()) {
      const bool is_adapter = item.key().find(".lora_") != std::string::npos;
      EXPECT_EQ(item.value().requires_grad(), is_adapter) << item.key();
      if (is_adapter) trained.insert(item.key());
      EXPECT_EQ(names.erase(item.key()), is_adapter ? 0U : 1U) << item.key();
    }
    EXPECT_TRUE(names.empty());
    EXPECT_TRUE(trained.contains("first.up.lora_A.weight"));
    EXPECT_TRUE(trained.contains("second.down.lora_B.weight"));
    EXPECT_EQ(trained.size(), 8U);
    EXPECT_EQ(lora_parameters(net).size(), 8U);
    const auto base = net->first->up->weight.clone();
    optim::AdamW optimizer(lora_parameters(net), optim::AdamWOptions(1e-2));
    const auto x = drawn_on_device({7, 12}, 1);
    const auto loss = [&] { return net(x).square().mean(); };
    const auto first = loss().item<double>();
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      loss().backward();
      optimizer.step();
    }
    EXPECT_LT(loss().item<double>(), 0.9 * first);
    EXPECT_TRUE(at::equal(net->first->up->weight, base));
    EXPECT_FALSE(net->first->up->weight.grad().defined());
  });
}

TEST_P(Lora, StartsAAsALinearAndBAsZero) {
  alone([] {
    auto layer = on_device(seeded(3, [] { return nn::Linear(400, 50); }));
    lora(layer, {.rank = 64});
    const auto named = layer->named_parameters();
    const auto& a = named["lora_A.weight"];
    EXPECT_EQ(a.sizes(), at::IntArrayRef({64, 400}));
    EXPECT_LE(a.abs().max().item<double>(), 1 / std::sqrt(400.0));
    EXPECT_NEAR(a.std().item<double>(), 1 / std::sqrt(3 * 400.0), 2e-3);
    EXPECT_EQ(named["lora_B.weight"].abs().max().item<double>(), 0);
  });
}

TEST_P(Lora, MergesUnmergesAndGoes) {
  alone([] {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      auto net = made_net();
      net->to(dtype);
      lora(net, small_lora());
      EXPECT_EQ(lora_parameters(net)[0].scalar_type(), at::kFloat);
      draw_adapters(net);
      net->eval();
      const auto x = drawn_on_device({7, 12}, 1).to(dtype);
      const auto tolerance = dtype == at::kFloat ? 1e-5 : 0.1;
      const at::Tensor with = net(x).detach(), base = net->first->up->weight.clone();
      merge_lora(net);
      expect_near(net(x), with, tolerance, "merged");
      unmerge_lora(net);
      expect_near(net(x), with, tolerance, "unmerged");
      expect_near(net->first->up->weight, base, dtype == at::kFloat ? 1e-6 : 0.05, "weight");
      merge_lora(net);
      remove_lora(net);
      expect_near(net(x), with, tolerance, "removed");
      EXPECT_EQ(net->parameters().size(), 12U);
      lora(net, small_lora());  // again
      expect_near(net(x), with, tolerance, "a new one");
    }
  });
}

TEST_P(Lora, DropsOutInTrainingAlone) {
  alone([] {
    auto net = made_net();
    auto options = small_lora();
    options.dropout = 0.5;
    lora(net, options);
    draw_adapters(net);
    const auto x = drawn_on_device({7, 12}, 1);
    EXPECT_FALSE(at::equal(net(x), net(x)));
    net->eval();
    EXPECT_TRUE(at::equal(net(x), net(x)));
  });
}

TEST_P(Lora, TakesPatternsAndAFilter) {
  alone([] {
    const auto adapted = [](const LoraOptions& options) {
      auto net = made_net();
      lora(net, options);
      std::set<std::string> names;
      for (const auto& item : lora_state_dict(net)) {
        if (item.first.ends_with(".lora_A.weight"))
          names.insert(item.first.substr(0, item.first.size() - 14));
      }
      return names;
    };
    using Names = std::set<std::string>;
    EXPECT_EQ(adapted({}).size(), 5U);
    EXPECT_EQ(adapted({.targets = {"up"}}), Names({"first.up", "second.up"}));
    EXPECT_EQ(adapted({.targets = {"first.*"}}), Names({"first.down", "first.up"}));
    EXPECT_EQ(adapted({.targets = {"*.up", "head"}}), Names({"first.up", "second.up", "head"}));
    EXPECT_EQ(adapted({.filter = [](const auto& name, const auto&) { return name == "head"; }}),
              Names({"head"}));
  });
}

/// The same step with and without something else applied.
void expect_same_training(const std::function<void(AdaptedNet&)>& before,
                          const std::function<void(AdaptedNet&)>& after, double tolerance,
                          at::ScalarType autocast = at::kFloat) {
  const auto gradients = [&](bool applies) {
    auto net = made_net();
    if (applies) before(net);
    lora(net, small_lora());
    draw_adapters(net);
    if (applies) after(net);
    const Autocast scope(run_device().type(), {.enabled = autocast != at::kFloat});
    net(drawn_on_device({16, 12}, 1)).to(at::kFloat).square().mean().backward();
    std::vector<at::Tensor> all;
    for (const auto& parameter : lora_parameters(net)) all.push_back(parameter.grad());
    return all;
  };
  const auto plain = gradients(false), other = gradients(true);
  for (size_t i = 0; i < plain.size(); ++i)
    expect_near(other[i], plain[i], tolerance, "gradient " + std::to_string(i));
}

TEST_P(Lora, GoesWithCheckpointAndAutocast) {
  alone([] {
    const auto nothing = [](AdaptedNet&) {};
    const auto recompute = [](AdaptedNet& net) { checkpoint(net->first), checkpoint(net->second); };
    expect_same_training(nothing, recompute, 1e-7);
    expect_same_training(recompute, nothing, 1e-7);
    expect_same_training(recompute, nothing, 1e-7, at::kBFloat16);
  });
}

TEST_P(Lora, GoesWithFp8BeforeAndAfter) {
  alone([] {
    if (run_device().is_cuda()) {
      auto trial = on_device(nn::Linear(16, 16));
      try {
        fp8(trial);
      } catch (const c10::NotImplementedError&) {
        GTEST_SKIP() << "a GPU without 8 bits";
      }
    }
    const auto output = [](bool adapts_first, bool is_fp8) {
      auto net = on_device(seeded(5, [] { return AdaptedNet(16, 32); }));
      if (is_fp8 && !adapts_first) fp8(net);
      lora(net, small_lora());
      if (is_fp8 && adapts_first) fp8(net);
      draw_adapters(net);
      const at::Tensor y = net(drawn_on_device({16, 16}, 1));
      y.square().mean().backward();
      EXPECT_TRUE(net->first->up->named_parameters()["lora_A.weight"].grad().defined());
      return y.detach();
    };
    const auto exact = output(true, false);
    EXPECT_TRUE(at::equal(output(true, true), output(false, true)));
    expect_near(output(true, true), exact, 0.3, "in 8 bits");
    EXPECT_FALSE(at::equal(output(true, true), exact));
  });
}

TEST_P(Lora, IsTrainedByACompiledStep) {
  alone([] {
    const auto trained = [](bool compiles) {
      auto net = made_net();
      lora(net, small_lora());
      draw_adapters(net);
      optim::AdamW optimizer(lora_parameters(net), optim::AdamWOptions(1e-2));
      std::function<at::Tensor(at::Tensor)> step = [&](at::Tensor x) {
        optimizer.zero_grad();
        const auto loss = net(x).square().mean();
        loss.backward();
        optimizer.step();
        return loss.detach();
      };
      if (compiles) step = compile(step, {.module = net.ptr(), .optimizer = optimizer});
      for (uint64_t i = 0; i < 5; ++i) step(drawn_on_device({7, 12}, i));
      return lora_state_dict(net);
    };
    const auto eager = trained(false), compiled = trained(true);
    for (const auto& [name, value] : eager) expect_near(*compiled.find(name), value, 1e-5, name);
  });
}

/// A program of before would add adapters to weights that have them.
TEST_P(Lora, IsMergedAndUnmergedUnderCompiledModules) {
  alone([] {
    auto net = made_net();
    lora(net, small_lora());
    draw_adapters(net);
    net->eval();
    const at::NoGradGuard no_grad;
    const auto x = drawn_on_device({7, 12}, 1);
    const at::Tensor expected = net(x);
    auto compiled = compile(net);
    for (int round = 0; round < 2; ++round) {
      for (int call = 0; call < 4; ++call) expect_near(compiled(x), expected, 1e-5, "adapters");
      merge_lora(net);
      for (int call = 0; call < 4; ++call) expect_near(compiled(x), expected, 1e-5, "merged");
      unmerge_lora(net);
    }
  });
}

TEST(LoraMemory, FrozenPartsHaveNoGradients) {
  auto net = seeded(5, [] { return AdaptedNet(256, 1024); });
  size_t base = 0;
  for (const auto& parameter : net->parameters()) base += parameter.nbytes();
  lora(net, {.rank = 4, .targets = {"up", "down"}});
  const auto x = at::randn({2, 256});
  net(x).square().mean().backward();
  for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
  const benchmarks::CountedMemory memory;
  net(x).square().mean().backward();
  EXPECT_LT(memory.peak(), base / 8);
  size_t gradients = 0;
  for (const auto& parameter : net->parameters())
    gradients += parameter.grad().defined() ? parameter.grad().nbytes() : 0;
  EXPECT_EQ(gradients, 4 * 4 * (256 + 1024) * sizeof(float));
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(LoraErrors, OfOptions) {
  auto net = AdaptedNet();
  expect_part(message_of([&] { lora(net, {.rank = 0}); }), "expected a rank of at least 1, got 0");
  expect_part(message_of([&] { lora(net, {.dropout = 1}); }), "dropout from 0 to below 1");
  expect_part(message_of([&] { lora(net, {.alpha = NAN}); }), "expected a finite alpha");
  expect_part(message_of<c10::TypeError>([&] { lora(net, {.dtype = at::kLong}); }),
              "floating-point dtype");
  expect_part(message_of([&] { lora(net, {.targets = {"upp"}}); }), "nearest names: 'up'");
  expect_part(message_of([&] { lora(net, {.filter = [](auto&, auto&) { return false; }}); }),
              "none that the filter takes");
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.requires_grad());
}

TEST(LoraErrors, OfModules) {
  auto net = AdaptedNet();
  expect_part(message_of([&] { merge_lora(net); }), "expected a module with adapters");
  lora(net, small_lora());
  expect_part(message_of([&] { lora(net, small_lora()); }), "already has lora applied");
  expect_part(message_of([&] { unmerge_lora(net); }), "expected adapters that are merged");
  merge_lora(net);
  expect_part(message_of([&] { merge_lora(net); }), "not merged yet");
  expect_part(message_of([&] { net(at::ones({1, 12})); }),
              "call unmerge_lora(net), or net->eval()");
  expect_part(message_of([&] { load_lora_state_dict(net, {}); }), "call unmerge_lora first");
  torch::nn::Sequential plain(torch::nn::Linear(3, 3));
  expect_part(message_of([&] { lora(plain); }), "expected a module whose calls can be hooked");
}

TEST(LoraErrors, OfWeightsThatOthersHave) {
  auto net = AdaptedNet();
  net->register_parameter("tied", net->first->up->weight);
  lora(net, small_lora());
  expect_part(message_of([&] { merge_lora(net); }), "'first.up.weight' is 'tied' as well");
}

}  // namespace
}  // namespace tessera::testing
