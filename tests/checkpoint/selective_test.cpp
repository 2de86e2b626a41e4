#include "checkpoint/outcome.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <future>

namespace tessera::testing {
namespace {

using torch::autograd::grad;

std::atomic<int> kernel_runs = 0;

at::Tensor cube_kernel(const at::Tensor& x) {
  ++kernel_runs;
  return x * x * x;
}

/// x³ as an operator whose kernel says how often it ran.
at::Tensor cube(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_checkpoint_test::cube", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below;
    return cube(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto x = context->get_saved_variables()[0];
    return {grads[0] * 3 * x * x};
  }
};
at::Tensor cube_autograd(const at::Tensor& x) { return Cube::apply(x); }

torch::Library& test_library(torch::Library::Kind kind, std::optional<c10::DispatchKey> key) {
  // Never destroyed: at exit the dispatcher goes first, which the thread sanitizer notices.
  return *new torch::Library(kind, "tessera_checkpoint_test", key, __FILE__, __LINE__);
}

[[maybe_unused]] const bool kRegistered = [] {
  test_library(torch::Library::DEF, std::nullopt).def("cube(Tensor x) -> Tensor");
  test_library(torch::Library::IMPL, c10::DispatchKey::CPU).impl("cube", cube_kernel);
  test_library(torch::Library::IMPL, c10::DispatchKey::Autograd).impl("cube", cube_autograd);
  return true;
}();

CheckpointOptions keeping(std::vector<std::string> names) {
  return {.context_fn = selective_contexts(SelectivePolicy(std::move(names)))};
}

at::Tensor two_cubes(const at::Tensor& x) { return cube(cube(x.sin()).tanh()).exp(); }

TEST(SelectiveCheckpoint, KeptOperatorsDoNotRunAgain) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto expected = grad({two_cubes(x).sum()}, {x})[0];
  kernel_runs = 0;
  expect_bitwise_equal(grad({checkpoint_call(two_cubes, x).sum()}, {x})[0], expected);
  EXPECT_EQ(kernel_runs, 4);
  kernel_runs = 0;
  const auto options = keeping({"tessera_checkpoint_test::cube"});
  expect_bitwise_equal(grad({checkpoint_call(options, two_cubes, x).sum()}, {x})[0], expected);
  EXPECT_EQ(kernel_runs, 2);
}

TEST(SelectiveCheckpoint, ThePolicyDecidesCallByCall) {
  const auto x = torch::randn({3}).requires_grad_();
  int seen = 0;
  const SelectivePolicy every_second([&seen](const c10::OperatorName& name) {
    if (name.name != "tessera_checkpoint_test::cube") return CheckpointPolicy::MustRecompute;
    return seen++ % 2 == 0 ? CheckpointPolicy::PreferSave : CheckpointPolicy::PreferRecompute;
  });
  kernel_runs = 0;
  const auto y = checkpoint_call({.context_fn = selective_contexts(every_second)}, two_cubes, x);
  expect_bitwise_equal(grad({y.sum()}, {x})[0], grad({two_cubes(x).sum()}, {x})[0]);
  EXPECT_EQ(seen, 2) << "asked by the forward alone";
  EXPECT_EQ(kernel_runs, 2 + 1 + 2);
}

TEST(SelectiveCheckpoint, BackwardAsOftenAsTheGraphAllows) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto expected = grad({two_cubes(x).sum()}, {x})[0];
  kernel_runs = 0;
  const auto y = checkpoint_call(keeping({"tessera_checkpoint_test::cube"}), two_cubes, x).sum();
  for (const bool retain : {true, true, false})
    expect_bitwise_equal(grad({y}, {x}, {}, retain)[0], expected);
  EXPECT_EQ(kernel_runs, 2);
}

TEST(SelectiveCheckpoint, SeparateBackwardsOfTwoResults) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) {
    const auto shared = cube(t);
    return std::make_pair(shared.sin().exp(), shared.cos().exp());
  };
  const auto [a, b] = checkpoint_call(keeping({"tessera_checkpoint_test::cube"}), function, x);
  // The first one leaves cube's own node to the second, as it would in a plain graph.
  const auto first = grad({a.sum()}, {x}, {}, /*retain_graph=*/true)[0];
  const auto second = grad({b.sum()}, {x})[0];
  expect_bitwise_equal(first, grad({cube(x).sin().exp().sum()}, {x})[0]);
  expect_bitwise_equal(second, grad({cube(x).cos().exp().sum()}, {x})[0]);
}

TEST(SelectiveCheckpoint, BlocksKeepTheBitsOfPlainTraining) {
  for (const double dropout : {0.0, 0.3}) {
    auto [plain, block] = twins<Block>(3, 16, dropout);
    checkpoint(block, {.context_fn = selective_contexts(save_matmul_results())});
    const auto x = torch::randn({4, 16});
    const auto run = [&x](Block& module) {
      return outcome_of(*module, {x}, [&](auto& leaves) { return module(leaves[0]); });
    };
    for (int step = 0; step < 2; ++step) expect_same(run(block), run(plain));
  }
}

TEST(SelectiveCheckpoint, KeptRandomOperatorsLeaveTheOthersTheirNumbers) {
  const auto function = [](const at::Tensor& x) {
    const auto first = std::get<0>(at::native_dropout(x.sin(), 0.5, true));
    return torch::dropout(first.exp(), 0.5, true).exp();
  };
  const auto x = torch::randn({64}).requires_grad_();
  torch::manual_seed(3);
  const auto expected = grad({function(x).sum()}, {x})[0];
  torch::manual_seed(3);
  const auto y = checkpoint_call(keeping({"aten::native_dropout"}), function, x);
  expect_bitwise_equal(grad({y.sum()}, {x})[0], expected);
}

TEST(SelectiveCheckpoint, NestedInOneAnother) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto options = keeping({"tessera_checkpoint_test::cube"});
  const auto outer = [&options](const at::Tensor& t) {
    return cube(checkpoint_call(options, two_cubes, t.cos())).exp();
  };
  const auto plain = [](const at::Tensor& t) { return cube(two_cubes(t.cos())).exp(); };
  expect_bitwise_equal(grad({checkpoint_call(options, outer, x).sum()}, {x})[0],
                       grad({plain(x).sum()}, {x})[0]);
}

TEST(SelectiveCheckpoint, InPlaceOperatorsOfTheCallLeaveWhatIsKeptAlone) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) {
    auto y = t.sin();
    const auto before = y + 1;
    y.mul_(2);
    y.view({3, 1}).add_(before.view({3, 1}));
    return (y * before).exp();
  };
  const auto expected = grad({function(x).sum()}, {x})[0];
  const auto y = checkpoint_call(keeping({"aten::sin"}), function, x).sum();
  for (const bool retain : {true, true, false})
    expect_bitwise_equal(grad({y}, {x}, {}, retain)[0], expected);
}

TEST(SelectiveCheckpoint, LinearThatAddsItsBiasInPlace) {
  // On 3-D input a Linear is a matrix product, a view unknown to autograd, and add_.
  nn::Linear linear(4, 4);
  const auto x = torch::randn({2, 3, 4}).requires_grad_();
  const auto function = [&linear](const at::Tensor& t) { return linear(t).sin().exp(); };
  const auto expected = grad({function(x).sum()}, {x})[0];
  const auto y =
      checkpoint_call({.context_fn = selective_contexts(save_matmul_results())}, function, x).sum();
  for (const bool retain : {true, true, false})
    expect_bitwise_equal(grad({y}, {x}, {}, retain)[0], expected);
}

TEST(SelectiveCheckpoint, AKeptResultChangedAfterTheCallIsAnError) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) {
    const auto y = (t * 2).sin();
    return std::make_pair(y, (y + 1).exp().exp());
  };
  const auto [kept, y] = checkpoint_call(keeping({"aten::sin"}), function, x);
  kept.mul_(2);
  EXPECT_NE(error_of<c10::Error>([&] {
              grad({y.sum()}, {x});
            }).find("the kept result of aten::sin to be unchanged"),
            std::string::npos);
}

// As autograd's threads for devices take over the state of the one that calls backward.
TEST(SelectiveCheckpoint, OtherThreadsWithItsStateRunPlainOperators) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) {
    const auto in_thread = [&, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      return t.detach().cos();
    };
    return t.sin() * std::async(std::launch::async, in_thread).get();
  };
  const auto y = checkpoint_call(keeping({"aten::sin", "aten::cos"}), function, x);
  EXPECT_TRUE(at::equal(grad({y.sum()}, {x})[0], grad({function(x).sum()}, {x})[0]));
}

TEST(SelectiveCheckpoint, UnknownOperatorIsAnError) {
  EXPECT_NE(error_of<c10::ValueError>([] {
              SelectivePolicy({std::string("aten::no_such_operator")});
            }).find("SelectivePolicy: expected the name of an operator"),
            std::string::npos);
  EXPECT_THROW(SelectivePolicy(SelectivePolicy::Decide()), c10::ValueError);
  SelectivePolicy(std::vector<std::string>{"aten::add.Tensor", "aten::mm"});
}

}  // namespace
}  // namespace tessera::testing
