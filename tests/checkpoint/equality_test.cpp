#include "checkpoint/outcome.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/IListRef.h>

#include <span>

namespace tessera::testing {

// Outside the anonymous namespace: found beside its struct.
struct Batch {
  at::Tensor x;
  std::optional<at::Tensor> scale;
  int repeats = 1;
};
void tessera_tensors(Batch& batch, auto&& visit) { visit(batch.x, batch.scale); }

struct Opaque {
  at::Tensor x;
};

namespace {

class AutocastScope {
 public:
  AutocastScope() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(CheckpointEquality, BlockWithDropout) {
  expect_same_training<Block>({torch::randn({6, 16})}, 16, 0.3);
}

TEST(CheckpointEquality, DropoutDiffersWithoutThePreservedState) {
  // The comparison itself: it must notice another mask.
  auto [plain, checkpointed] = twins<Block>(3, 16, 0.5);
  checkpoint(checkpointed, {.preserve_rng_state = false});
  const auto x = torch::randn({6, 16});
  const auto run = [&x](Block& block) {
    return outcome_of(*block, {x}, [&](auto& leaves) { return block(leaves[0]); });
  };
  const auto actual = run(checkpointed), expected = run(plain);
  expect_bitwise_equal(actual.tensors[0].second, expected.tensors[0].second);
  EXPECT_FALSE(tensors_bitwise_equal(actual.tensors[1].second, expected.tensors[1].second));
}

TEST(CheckpointEquality, BatchNormInEvaluation) {
  nn::BatchNorm1d plain(8), norm(8);
  plain->eval();
  norm->eval();
  checkpoint(norm);
  const auto x = torch::randn({4, 8});
  const auto run = [&x](nn::BatchNorm1d& module) {
    return outcome_of(*module, {x}, [&](auto& leaves) { return module(leaves[0]); });
  };
  expect_same(run(norm), run(plain));
}

TEST(CheckpointEquality, BatchNormInTraining) {
  // Also what PyTorch's checkpoint changes: the running statistics.
  nn::BatchNorm1d plain(8), norm(8);
  checkpoint(norm, {.early_stop = false});
  const auto x = torch::randn({4, 8});
  const auto run = [&x](nn::BatchNorm1d& module) {
    return outcome_of(*module, {x}, [&](auto& leaves) { return module(leaves[0]); });
  };
  expect_same(run(norm), run(plain));
}

TEST(CheckpointEquality, AutocastEndedBeforeBackward) {
  auto [plain, checkpointed] = twins<Block>(3, 16, 0.2);
  checkpoint(checkpointed);
  const auto run = [](Block& block) {
    return outcome_of(*block, {torch::ones({4, 16})}, [&](auto& leaves) {
      const AutocastScope autocast;
      auto y = block(leaves[0]);
      EXPECT_EQ(block->up(leaves[0]).scalar_type(), at::kBFloat16);
      return y;
    });
  };
  expect_same(run(checkpointed), run(plain));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(CheckpointEquality, BackwardInsideAutocastOfAForwardOutside) {
  auto [plain, checkpointed] = twins<Block>(3, 16);
  checkpoint(checkpointed);
  const auto run = [](Block& block) {
    const auto x = torch::ones({4, 16}).requires_grad_();
    const auto loss = block(x).sum();
    const AutocastScope autocast;
    loss.backward();
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    return x.grad();
  };
  expect_bitwise_equal(run(checkpointed), run(plain));
}

TEST(CheckpointEquality, LstmWithAndWithoutState) {
  const auto options = torch::nn::LSTMOptions(5, 7).num_layers(2).dropout(0.4);
  auto [plain, checkpointed] = twins<nn::LSTM>(3, options);
  checkpoint(checkpointed);
  const auto x = torch::randn({3, 2, 5}), h = torch::randn({2, 2, 7}), c = torch::randn({2, 2, 7});
  const auto run = [&](nn::LSTM& lstm) {
    return outcome_of(*lstm, {x, h, c}, [&](auto& leaves) {
      const auto [first, state] = lstm(leaves[0]);
      const auto [second, end] = lstm(first.narrow(2, 0, 5), std::make_tuple(leaves[1], leaves[2]));
      return second + std::get<0>(end).sum() + std::get<1>(state).sum();
    });
  };
  expect_same(run(checkpointed), run(plain));
}

TEST(CheckpointEquality, SequentialModuleAndSequentialHelper) {
  const auto make = [] {
    return nn::Sequential(nn::Linear(8, 16), nn::Tanh(), nn::Dropout(0.3), nn::Linear(16, 8),
                          nn::Sigmoid());
  };
  auto plain = seeded(3, make), whole = seeded(3, make), parts = seeded(3, make);
  checkpoint(whole);
  const auto x = torch::randn({4, 8});
  const auto expected =
      outcome_of(*plain, {x}, [&](auto& leaves) { return plain->forward(leaves[0]); });
  expect_same(outcome_of(*whole, {x}, [&](auto& leaves) { return whole->forward(leaves[0]); }),
              expected);
  for (const int segments : {1, 2, 3, 5}) {
    parts->zero_grad();
    expect_same(
        outcome_of(*parts, {x},
                   [&](auto& leaves) { return checkpoint_sequential(parts, segments, leaves[0]); }),
        expected);
  }
}

TEST(CheckpointEquality, SequentialHelperTakesFunctions) {
  nn::Linear first(4, 4), second(4, 4);
  const auto x = torch::randn({2, 4}).requires_grad_();
  const auto y =
      checkpoint_sequential({first, [](at::Tensor t) { return t.tanh(); }, second}, 2, x);
  expect_bitwise_equal(y, second(first(x).tanh()));
  const auto grad = torch::autograd::grad({y.sum()}, {x})[0];
  expect_bitwise_equal(grad, torch::autograd::grad({second(first(x).tanh()).sum()}, {x})[0]);
}

/// The function form against the plain call, by the gradients of two leaves.
template <class F, class... A>
void expect_same_call(const F& function, const std::vector<at::Tensor>& leaves, A&&... arguments) {
  const auto expected = torch::autograd::grad({function(arguments...)}, leaves, {}, {}, false,
                                              /*allow_unused=*/true);
  const auto actual = torch::autograd::grad({checkpoint_call(function, arguments...)}, leaves, {},
                                            {}, false, /*allow_unused=*/true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined());
    if (actual[i].defined()) expect_bitwise_equal(actual[i], expected[i]);
  }
}

TEST(CheckpointCall, TakesNonTensorsUndefinedTensorsAndOptionals) {
  const auto a = torch::randn({3}).requires_grad_(), b = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& x, const at::Tensor& missing, double factor,
                           const std::optional<at::Tensor>& y, const std::string& mode,
                           std::vector<at::Tensor> more) {
    auto result = (x * factor).sin();
    if (missing.defined()) result = result + missing;
    if (y) result = result * *y;
    if (mode == "exp") result = result.exp();
    for (const auto& other : more) result = result * other;
    return result.sum();
  };
  const std::vector<at::Tensor> more = {a, b};
  expect_same_call(function, {a, b}, a, at::Tensor(), 0.5, std::optional<at::Tensor>(b), "exp",
                   more);
  expect_same_call(function, {a, b}, a, b, 0.5, std::nullopt, std::string("plain"),
                   std::vector<at::Tensor>());
}

TEST(CheckpointCall, TakesStructs) {
  const auto a = torch::randn({3}).requires_grad_(), b = torch::randn({3}).requires_grad_();
  const auto function = [](const Batch& batch) {
    auto result = batch.x;
    for (int i = 0; i < batch.repeats; ++i) result = result.sin() * batch.scale.value_or(batch.x);
    return result.sum();
  };
  expect_same_call(function, {a, b}, Batch{a, b, 3});
  expect_same_call(function, {a, b}, Batch{a, std::nullopt, 2});
  expect_same_call([](const Opaque& given) { return given.x.sin().exp().sum(); }, {a}, Opaque{a});
}

TEST(CheckpointCall, OwnsWhatViewsOfTheCallersMemoryShow) {
  const auto a = torch::randn({2, 3}).requires_grad_();
  at::Tensor y;
  {
    std::vector<int64_t> shape = {3, 2};
    std::string mode = "sin";
    y = checkpoint_call(
        [](const at::Tensor& x, at::IntArrayRef sizes, std::string_view name) {
          const auto viewed = x.view(sizes);
          return (name == "sin" ? viewed.sin() : viewed.cos()).exp();
        },
        a, at::IntArrayRef(shape), std::string_view(mode));
    shape = {1, 1};
    mode = "cos";
  }
  const auto grad = torch::autograd::grad({y.sum()}, {a})[0];
  expect_bitwise_equal(grad, torch::autograd::grad({a.sin().exp().sum()}, {a})[0]);
}

TEST(CheckpointCall, OwnsTheTensorsThatViewsShow) {
  const auto a = torch::randn({3}).requires_grad_();
  const auto multiply = [](const auto& tensors) {
    auto product = torch::ones({3});
    for (const at::Tensor& tensor : tensors) product = product * tensor.sin().exp();
    return product;
  };
  const auto expected = torch::autograd::grad({multiply(std::vector{a, a}).sum()}, {a})[0];
  const auto expect_owned = [&](const auto& view_of) {
    std::vector<at::Tensor> tensors = {a, a};
    const auto y = checkpoint_call(multiply, view_of(tensors));
    tensors = {torch::zeros({3}), torch::zeros({3})};
    expect_bitwise_equal(torch::autograd::grad({y.sum()}, {a})[0], expected);
  };
  expect_owned([](auto& tensors) { return at::TensorList(tensors); });
  expect_owned([](auto& tensors) { return at::ITensorListRef(tensors); });
  expect_owned([](auto& tensors) { return std::span<at::Tensor>(tensors); });
  expect_owned([](auto& tensors) { return std::span<const at::Tensor>(tensors); });
}

struct ProductImpl : torch::nn::Module {
  at::Tensor forward(at::TensorList tensors) {
    ++calls;
    return tensors[0].sin().exp() * tensors[1].cos().exp();
  }
  int calls = 0;
};
TESSERA_MODULE(Product);

TEST(CheckpointEquality, ModuleThatTakesAListOfTensors) {
  auto [plain, checkpointed] = twins<Product>(3);
  checkpoint(checkpointed);
  const std::vector<at::Tensor> inputs = {torch::randn({3}), torch::randn({3})};
  const auto run = [&](Product& module) {
    return outcome_of(*module, inputs, [&](auto& leaves) { return module(leaves); });
  };
  expect_same(run(checkpointed), run(plain));
  EXPECT_EQ(checkpointed->calls, 2);
}

TEST(CheckpointCall, DoesNotTouchTheCallersContainers) {
  const auto a = torch::randn({3}).requires_grad_();
  std::vector<at::Tensor> list = {a};
  const c10::IValue value(c10::List<at::Tensor>({a}));
  const auto y = checkpoint_call(
      [](const std::vector<at::Tensor>& given, const c10::IValue& more) {
        return given[0].sin().exp() * more.toTensorList().get(0);
      },
      list, value);
  EXPECT_TRUE(list[0].is_same(a));
  EXPECT_TRUE(at::Tensor(value.toTensorList().get(0)).is_same(a));
  const auto grad = torch::autograd::grad({y.sum()}, {a})[0];
  expect_bitwise_equal(grad, torch::autograd::grad({(a.sin().exp() * a).sum()}, {a})[0]);
}

TEST(CheckpointCall, ReturnsTuplesVectorsStructsAndNothing) {
  const auto a = torch::randn({3}).requires_grad_();
  const auto [x, count, y] = checkpoint_call(
      [](const at::Tensor& t) { return std::make_tuple(t.sin().exp(), 5, t.cos().exp()); }, a);
  EXPECT_EQ(count, 5);
  const auto parts = checkpoint_call(
      [](const at::Tensor& t) { return std::vector<at::Tensor>{t.tanh().exp(), t}; }, a);
  const auto batch =
      checkpoint_call([](const at::Tensor& t) { return Batch{t.sigmoid().exp(), {}, 2}; }, a);
  at::Tensor by_reference;
  checkpoint_call([](const at::Tensor& t, at::Tensor& out) { out = t.sin().exp(); }, a,
                  by_reference);
  const auto grad =
      torch::autograd::grad({(x * y + parts[0] * batch.x + by_reference).sum()}, {a})[0];
  const auto plain =
      a.sin().exp() * a.cos().exp() + a.tanh().exp() * a.sigmoid().exp() + a.sin().exp();
  expect_equal(grad, torch::autograd::grad({plain.sum()}, {a})[0]);
}

TEST(CheckpointCall, CallsHoldersPointersModulesAndFunctions) {
  Block block(8);
  const std::shared_ptr<nn::Hooked<BlockImpl>> pointer = block.ptr();
  const Block constant = block;
  torch::nn::Linear plain(8, 8);
  const auto x = torch::randn({2, 8}).requires_grad_();
  const auto gradient = [&x](const at::Tensor& y) {
    return torch::autograd::grad({y.square().sum()}, {x})[0];
  };
  const auto expected = gradient(block(x));
  expect_bitwise_equal(gradient(checkpoint_call(block, x)), expected);
  expect_bitwise_equal(gradient(checkpoint_call(constant, x)), expected);
  expect_bitwise_equal(gradient(checkpoint_call(pointer, x)), expected);
  expect_bitwise_equal(gradient(checkpoint_call(*block, x)), expected);
  expect_bitwise_equal(gradient(checkpoint_call(plain, x)), gradient(plain(x)));
  expect_bitwise_equal(gradient(checkpoint_call(&torch::relu, x)), gradient(torch::relu(x)));
}

TEST(CheckpointCall, InputsThatNeedNoGradient) {
  Block block(8);
  const auto x = torch::randn({2, 8});
  block(x).sum().backward();
  const auto expected = block->up->weight.grad().clone();
  block->zero_grad();
  checkpoint_call(block, x).sum().backward();
  expect_bitwise_equal(block->up->weight.grad(), expected);
}

}  // namespace
}  // namespace tessera::testing
