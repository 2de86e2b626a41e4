#include "checkpoint/outcome.h"

#include <torch/csrc/autograd/engine.h>

namespace tessera::testing {

struct CoderImpl : torch::nn::Module {
  CoderImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x).sin().exp(); }
  at::Tensor encode(const at::Tensor& x, double scale) {
    ++encoded;
    return (linear(x).tanh() * scale).exp();
  }
  torch::nn::Linear linear;
  int encoded = 0;
};
TESSERA_MODULE(Coder);
TESSERA_MODULE_METHOD(Coder, encode);

namespace {

using torch::autograd::grad;

TEST(CheckpointModule, ReturnsWhatItWasGiven) {
  Block block(8);
  Block& same = checkpoint(block);
  EXPECT_EQ(&same, &block);
  Block other(8);
  auto& module = checkpoint(*other);
  EXPECT_EQ(&module, other.get());
  auto pointer = checkpoint(std::make_shared<nn::Hooked<BlockImpl>>(8));
  static_assert(std::is_same_v<decltype(pointer), std::shared_ptr<nn::Hooked<BlockImpl>>>);
  EXPECT_NE(pointer, nullptr);
  block = checkpoint(Block(8));
  EXPECT_TRUE(checkpoint_state(block).enabled);
}

TEST(CheckpointModule, LeavesNamesAlone) {
  auto [plain, block] = twins<Block>(3, 8);
  checkpoint(block);
  EXPECT_EQ(plain->named_parameters().keys(), block->named_parameters().keys());
  EXPECT_EQ(plain->name(), block->name());
}

TEST(CheckpointModule, CanBeSwitchedOff) {
  Block block(8);
  checkpoint(block);
  checkpoint_state(block).enabled = false;
  block(torch::randn({2, 8})).sum().backward();
  EXPECT_EQ(block->calls, 1);
  checkpoint_state(block).enabled = true;
  block(torch::randn({2, 8})).sum().backward();
  EXPECT_EQ(block->calls, 3);
}

TEST(CheckpointModule, RecomputationRunsTheOtherHooks) {
  std::vector<std::string> events;
  const auto note = [&events](const char* name) {
    return [&events, name](auto&&...) { events.emplace_back(name); };
  };
  Block block(8);
  register_forward_pre_hook(*block, note("earlier pre"));
  register_forward_hook(*block, note("earlier post"));
  checkpoint(block, {.early_stop = false});
  register_forward_pre_hook(*block, note("later pre"));
  register_forward_hook(*block, note("later post"));
  const auto y = block(torch::randn({2, 8}));
  const std::vector<std::string> once = {"earlier pre", "later pre", "earlier post", "later post"};
  EXPECT_EQ(events, once);
  events.clear();
  y.sum().backward();
  EXPECT_EQ(events, once);
}

TEST(CheckpointModule, KeepsTheArgumentsThatEarlierHooksMade) {
  auto [plain, block] = twins<Block>(3, 8);
  int casts = 0;
  for (auto* module : {&plain, &block}) {
    register_forward_pre_hook(**module, [&casts](auto&, nn::Arguments& arguments) {
      if (arguments.tensor(0).scalar_type() == at::kFloat) return;
      ++casts;
      arguments.tensor(0) = arguments.tensor(0).to(at::kFloat);
    });
  }
  checkpoint(block);
  const auto x = torch::randn({2, 8}, at::kDouble);
  const auto run = [&x](Block& module) {
    return outcome_of(*module, {x}, [&](auto& leaves) { return module(leaves[0]); });
  };
  expect_same(run(block), run(plain));
  EXPECT_EQ(casts, 2) << "the recomputation starts from the cast argument";
}

TEST(CheckpointModule, ResultsReplacedByHooksAreOutsideOfTheCall) {
  auto [plain, block] = twins<Block>(3, 8);
  for (auto* module : {&plain, &block}) {
    register_forward_hook(**module, [](auto&, auto&, nn::Result& result) {
      result.tensor() = result.tensor().exp().sin();
    });
  }
  checkpoint(block);
  const auto run = [](Block& module) {
    return outcome_of(*module, {torch::ones({2, 8})},
                      [&](auto& leaves) { return module(leaves[0]); });
  };
  expect_same(run(block), run(plain));
}

TEST(CheckpointModule, BackwardHooksRunOnce) {
  Block block(8);
  checkpoint(block);
  int runs = 0;
  register_full_backward_hook(*block, [&runs](auto&&...) { ++runs; });
  block(torch::randn({2, 8}).requires_grad_()).sum().backward();
  EXPECT_EQ(runs, 1);
}

TEST(CheckpointModule, OtherEntryPointsAreCheckpointedToo) {
  Coder coder;
  checkpoint(coder);
  const auto x = torch::randn({2, 4}).requires_grad_();
  const auto y = coder->encode(x, 2);
  expect_bitwise_equal(grad({y.sum()}, {x})[0],
                       grad({(coder->linear(x).tanh() * 2).exp().sum()}, {x})[0]);
  EXPECT_EQ(coder->encoded, 2);
}

TEST(SavedTensorHooks, PackAndUnpackEveryTensor) {
  std::vector<at::Tensor> packed;
  int unpacked = 0;
  const auto x = torch::randn({3}).requires_grad_();
  at::Tensor y;
  {
    saved_tensor_hooks hooks(
        [&](const at::Tensor& tensor) {
          packed.push_back(tensor);
          return packed.size() - 1;
        },
        [&](size_t index) {
          ++unpacked;
          return packed[index];
        });
    y = x.sin().exp();
  }
  const auto outside = y.cos();
  EXPECT_EQ(packed.size(), 2U);
  expect_bitwise_equal(packed[0], x.detach());
  expect_bitwise_equal(packed[1], y.detach());
  EXPECT_FALSE(packed[1].requires_grad());
  expect_bitwise_equal(grad({outside.sum()}, {x})[0], grad({x.sin().exp().cos().sum()}, {x})[0]);
  EXPECT_EQ(unpacked, 2);
}

TEST(SavedTensorHooks, TheInnermostCountsAndScopesEnd) {
  std::string events;
  const auto scope = [&events](char name) {
    return saved_tensor_hooks(
        [&events, name](const at::Tensor& tensor) {
          events += name;
          return tensor;
        },
        [](const at::Tensor& tensor) { return tensor; });
  };
  const auto x = torch::randn({3}).requires_grad_();
  const auto outer = scope('a');
  auto y = x.sin();
  {
    const auto inner = scope('b');
    y = y.cos();
  }
  y = y.exp();
  EXPECT_EQ(events, "aba");
}

TEST(SavedTensorHooks, ServeTheInputsOfACheckpointedCall) {
  int packed = 0;
  const saved_tensor_hooks hooks(
      [&packed](const at::Tensor& tensor) {
        ++packed;
        return tensor;
      },
      [](const at::Tensor& tensor) { return tensor; });
  Block block(8);
  checkpoint(block);
  const auto y = block(torch::randn({2, 8}));
  EXPECT_EQ(packed, 1);
  y.backward(torch::ones_like(y));
}

TEST(SavedTensorHooks, WrongShapeFromUnpackIsAnError) {
  const auto x = torch::randn({3}).requires_grad_();
  at::Tensor y;
  {
    const saved_tensor_hooks hooks([](const at::Tensor& tensor) { return tensor; },
                                   [](const at::Tensor& tensor) { return tensor.repeat({2}); });
    y = x.sin();
  }
  EXPECT_NE(error_of<c10::ValueError>([&] {
              y.sum().backward();
            }).find("saved_tensor_hooks: expected unpack to return a tensor of shape [3]"),
            std::string::npos);
}

TEST(SavedTensorHooks, NoReferenceCycle) {
  c10::weak_intrusive_ptr<at::TensorImpl> result{c10::intrusive_ptr<at::TensorImpl>()};
  {
    const saved_tensor_hooks hooks([](const at::Tensor& tensor) { return tensor; },
                                   [](const at::Tensor& tensor) { return tensor; });
    const auto y = torch::randn({3}).requires_grad_().exp();
    result = y.getIntrusivePtr();
  }
  EXPECT_TRUE(result.expired());
}

TEST(SavedTensorHooks, SaveOnCpuChangesNoResult) {
  const auto run = [](bool offload) {
    auto block = seeded(3, [] { return Block(8, 0.2); });
    return outcome_of(*block, {torch::ones({2, 8})}, [&](auto& leaves) {
      std::unique_ptr<save_on_cpu> scope;
      if (offload) scope = std::make_unique<save_on_cpu>();
      return block(leaves[0]);
    });
  };
  expect_same(run(true), run(false));
}

/// An engine that somebody else has installed, as Python's torch does.
struct OtherEngine final : torch::autograd::Engine {
  static Engine& get() { return instance(); }
  static OtherEngine& instance() {
    static auto& engine = *new OtherEngine();
    return engine;
  }
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    ++backwards;
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    ++saved;
    return nullptr;
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    ++traces;
    return Engine::make_anomaly_metadata();
  }
  int backwards = 0;
  int saved = 0;
  int traces = 0;
};

TEST(SavedTensorHooks, AnotherEngineStaysInChargeOfTheRest) {
  torch::autograd::set_default_engine_stub(&OtherEngine::get);
  const auto& other = OtherEngine::instance();
  const auto x = torch::randn({3}).requires_grad_();
  at::Tensor y;
  {
    const save_on_cpu scope;
    y = x.sin();
  }
  EXPECT_EQ(other.saved, 0) << "the scope's hooks count";
  y = y.cos();
  EXPECT_GT(other.saved, 0);
  y.grad_fn()->metadata();
  EXPECT_EQ(other.traces, 1);
  y.sum().backward();
  EXPECT_EQ(other.backwards, 1);
  const auto before = x.grad().clone();
  checkpoint_call([](const at::Tensor& t) { return t.sin().cos(); }, x).sum().backward();
  EXPECT_EQ(other.backwards, 2);
  expect_bitwise_equal(x.grad() - before, before, "gradient");
  torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  const saved_tensor_hooks::Pack pack = [](const at::Tensor& tensor) { return std::any(tensor); };
  const saved_tensor_hooks::Unpack unpack = [](const std::any& packed) {
    return std::any_cast<at::Tensor>(packed);
  };
  const saved_tensor_hooks scope(pack, unpack);  // in front of libtorch's own again
  x.exp().sum().backward();
  EXPECT_EQ(other.backwards, 2);
}

}  // namespace
}  // namespace tessera::testing
