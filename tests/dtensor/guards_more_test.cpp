// What ranks must agree on, and what numbers that are not finite do.
#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>
#include <torch/library.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AgreementOnThreads, InfinitiesOfTheFirstRankStayInfinite) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto local = rank() == 0 ? torch::tensor({kInfinity, -kInfinity, 1.0})
                             : torch::tensor({kInfinity, 2.0, -kInfinity});
    const auto expected = torch::tensor({kInfinity, -kInfinity, 1.0});
    local.requires_grad_();
    const auto whole = DTensor::from_local(local, mesh, {}, {.run_check = true});
    expect_equal(whole.to_local().detach(), expected);
    whole.sum().backward();
    expect_equal(local.grad(), torch::ones({3}));
  });
}

TEST(AgreementOnThreads, NumbersOfDimensionsThatDifferAreAnErrorOnAllRanks) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto local = rank() == 0 ? torch::ones({2, 3}) : torch::ones({2, 3, 2});
    for (const auto& placement : {Shard(-1), Shard(0), Replicate(), Partial()}) {
      EXPECT_THAT(
          message_of([&] { DTensor::from_local(local, mesh, {placement}, {.run_check = true}); }),
          HasSubstr("expected parts of one number of dimensions on all ranks"))
          << placement;
    }
    EXPECT_THAT(
        message_of([&] { DTensor::from_local(local, mesh, {Shard(2)}, {.run_check = true}); }),
        HasSubstr("expected a shard of one of the tensor's 2 dimensions"))
        << "the rank that could go on hears of it, too";
    const auto good =
        DTensor::from_local(torch::ones({2, 3}), mesh, {Shard(0)}, {.run_check = true});
    EXPECT_EQ(good.size(0), 4) << "the ranks are still in step";
  });
}

TEST(OutsideOfTheMeshOnThreads, ResultsHaveTheirDtype) {
  run_threads(3,
              [] {
                const DeviceMesh mesh(torch::kCPU, {0, 1});
                const auto whole = torch::arange(12).view({4, 3});
                const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions = {
                    [](const at::Tensor& x) { return x + 1; },
                    [](const at::Tensor& x) { return x.gt(3); },
                    [](const at::Tensor& x) { return x.to(torch::kDouble) * 2; },
                    [](const at::Tensor& x) { return x.to(torch::kHalf).t(); },
                    [](const at::Tensor& x) { return x.to(torch::kDouble).softmax(1); },
                    [](const at::Tensor& x) { return std::get<1>(x.to(torch::kFloat).max(1)); },
                    [](const at::Tensor& x) { return x.chunk(3, 1)[1]; },
                    [](const at::Tensor& x) { return x.sum(); },
                    [](const at::Tensor& x) { return at::_foreach_mul({x}, 2)[0]; },
                };
                const auto x = distribute_tensor(whole, mesh, {Shard(0)}, std::nullopt);
                for (size_t i = 0; i < functions.size(); ++i) {
                  const auto result = functions[i](x);
                  EXPECT_EQ(result.scalar_type(), functions[i](whole).scalar_type()) << i;
                  EXPECT_EQ(DTensor::of(result).to_local().scalar_type(), result.scalar_type())
                      << i;
                }
              },
              {.backend = "shm"});
}

TEST(NotFiniteOnThreads, FactorsReachTheWholeAndNotItsSummands) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({4, 3});
    const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>>
        functions = {
            {"x * inf", [](const at::Tensor& x) { return x * kInfinity; }},
            {"x * -inf", [](const at::Tensor& x) { return x * -kInfinity; }},
            {"inf tensor", [](const at::Tensor& x) { return x * torch::tensor(kInfinity); }},
            {"x / 0", [](const at::Tensor& x) { return x / 0.0; }},
            {"0 tensor", [](const at::Tensor& x) { return x / torch::tensor(0.0); }},
            {"x * 2", [](const at::Tensor& x) { return x * 2; }},
            {"foreach", [](const at::Tensor& x) { return at::_foreach_mul({x}, kInfinity)[0]; }},
            {"foreach div", [](const at::Tensor& x) { return at::_foreach_div({x}, 0.0)[0]; }},
            {"mul_", [](const at::Tensor& x) { return x.clone().mul_(kInfinity); }},
        };
    for (const auto& [name, function] : functions)
      expect_equal(full_of(function(placed(whole, mesh, {Partial()}))), function(whole), name,
                   Tolerance{1e-5, 1e-5});
    const auto scaled = DTensor::of(placed(whole, mesh, {Partial()}) * 2);
    EXPECT_EQ(scaled.placements(), Placements{Partial()}) << "finite factors wait for the sum";
  });
}

TEST(PlainGradientsOnThreads, OfDistributedLeavesAreRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto leaf = at::Tensor(placed(numbered({4}), mesh, {Shard(0)})).requires_grad_();
    const auto text =
        AllOf(HasSubstr("expected a distributed gradient of a distributed tensor, got a plain one"),
              HasSubstr("distribute what is passed to backward()"));
    EXPECT_THAT(message_of<c10::TypeError>([&] { (leaf * 2).backward(torch::ones({4})); }), text);
    EXPECT_FALSE(leaf.grad().defined());
    EXPECT_THAT(message_of<c10::TypeError>(
                    [&] { torch::autograd::grad({(leaf * 2)}, {leaf}, {torch::ones({4})}); }),
                text);
    (leaf * 2).backward(placed(torch::ones({4}), mesh, {Replicate()}));
    expect_equal(full_of(leaf.grad()), torch::full({4}, 2.0));

    // A formula's own zeros: what is repeated no times has no influence.
    auto unused = at::Tensor(placed(numbered({4}), mesh, {Shard(0)})).requires_grad_();
    unused.repeat({0}).sum().backward();
    EXPECT_EQ(DTensor::of(unused.grad()).placements(), Placements{Shard(0)});
    expect_equal(full_of(unused.grad()), torch::zeros({4}));

    auto parameter = numbered({4}).requires_grad_();
    distribute_tensor_(parameter, mesh, {Shard(0)}, std::nullopt);
    EXPECT_THAT(message_of<c10::TypeError>([&] { (parameter * 2).backward(torch::ones({4})); }),
                text);
  });
}

TEST(FromLocalOnThreads, UnevenPartsWithoutAShapeAreAnErrorOnAllRanks) {
  const std::vector<std::function<void(const at::Tensor&)>> uses = {
      [](const at::Tensor& x) { full_of(x); },
      [](const at::Tensor& x) { full_of(x.mean()); },
      [](const at::Tensor& x) { full_of((x * 2).sum()); },
      [](const at::Tensor& x) { full_of(x.cumsum(0)); },
  };
  for (const char* backend : {"shm", "gloo"}) {
    for (const auto& use : uses) {
      run_threads(2,
                  [&] {
                    const auto mesh = init_device_mesh(torch::kCPU, {2});
                    const auto x =
                        DTensor::from_local(torch::ones({rank() == 0 ? 3 : 2}), mesh, {Shard(0)});
                    EXPECT_THAT(message_of<c10::Error>([&] { use(x); }),
                                AllOf(HasSubstr("from_local of a whole of [6]"),
                                      HasSubstr("from_local of a whole of [4]")));
                  },
                  {.backend = backend, .timeout = std::chrono::seconds(20)});
    }
  }
}

TEST(FromLocalOnThreads, EvenPartsWithoutAShapeAndUnevenOnesWithOneGoTogether) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({5, 4});
    for (int repetition = 0; repetition < 3; ++repetition) {
      const auto first = DTensor::from_local(torch::ones({2, 3}), mesh, {Shard(0), Shard(1)});
      const auto second = DTensor::from_local(torch::ones({3}), mesh, {Replicate(), Shard(0)});
      expect_equal(full_of(placed(whole, mesh, {Shard(0), Shard(0)})), whole);
      expect_equal(full_of(first.mean()), torch::ones({}));
      expect_equal(full_of(second), torch::ones({6}));
    }
  });
}

TEST(FromLocalOnThreads, StridedShardsThatTheMeshCannotHaveAreRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto part = rank() == 0 ? torch::tensor({0, 1, 3}) : torch::tensor({2, 4});
    EXPECT_THAT(message_of([&] { DTensor::from_local(part, mesh, {StridedShard(0, 2)}); }),
                AllOf(HasSubstr("got [StridedShard(0, 2)]"), HasSubstr("would mean [Shard(0)]")));
  });
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto part = torch::ones({2});
    EXPECT_THAT(
        message_of([&] { DTensor::from_local(part, mesh, {StridedShard(0, 4), Shard(0)}); }),
        HasSubstr("would mean [StridedShard(0, 2), Shard(0)]"));
    const auto whole = torch::arange(8);
    const auto tp = whole.chunk(2)[mesh.local_rank(1)];
    expect_equal(full_of(DTensor::from_local(tp.chunk(2)[mesh.local_rank(0)].clone(), mesh,
                                             {StridedShard(0, 2), Shard(0)})),
                 whole);
  });
}

at::Tensor noisy(const at::Tensor& x) { return x + torch::rand_like(x); }

TORCH_LIBRARY(tessera_guards_test, library) {
  library.def(torch::schema("noisy(Tensor x, float dropout_p) -> Tensor"),
              {at::Tag::nondeterministic_seeded});
  library.impl("noisy", c10::DispatchKey::CPU,
               [](const at::Tensor& x, double p) { return p == 0 ? x.clone() : noisy(x); });
}

at::Tensor call_noisy(const at::Tensor& x, double p) {
  static const auto kOperator = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("tessera_guards_test::noisy", "")
                                    .typed<at::Tensor(const at::Tensor&, double)>();
  return kOperator.call(x, p);
}

TEST(HiddenDraws, NeedGeneratorsThatAgree) {
  run_processes(2, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    const auto x = placed(numbered({4, 3}), mesh, {Shard(0)});
    torch::manual_seed(3);
    const auto expected = noisy(numbered({4, 3}));
    torch::manual_seed(3);
    expect_bitwise_equal(full_of(call_noisy(x, 0.5)), expected);
    torch::manual_seed(3 + rank());
    EXPECT_THAT(message_of([&] { call_noisy(x, 0.5); }),
                AllOf(HasSubstr("tessera_guards_test::noisy"),
                      HasSubstr("random generators in one state on all ranks"),
                      HasSubstr("torch::manual_seed")));
    expect_bitwise_equal(full_of(call_noisy(x, 0)), numbered({4, 3}), "draws nothing");
  });
}

}  // namespace
}  // namespace tessera::testing
