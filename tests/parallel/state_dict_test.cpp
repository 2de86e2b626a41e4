// Values of tensor parallel models: what state dicts hold, and what can be loaded into them.
#include <tessera/optim.h>
#include <tessera/state_dict.h>

#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>

#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Uneven on two ranks and on four.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    up = register_module("up", nn::Linear(6, 7));
    norm = register_module("norm", nn::BatchNorm1d(7));
    down = register_module("down", nn::Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x)); }
  nn::Linear up{nullptr}, down{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TESSERA_MODULE(Net);

const ParallelPlan& up_and_down() {
  static const ParallelPlan kPlan{{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
  return kPlan;
}

void expect_values(Net& parallel, Net& plain, const std::string& label) {
  const auto expected = state_dict(plain);
  for (const auto& [name, tensor] : state_dict(parallel))
    expect_bitwise_equal(full_value(tensor), expected[name], label + ": " + name);
}

void expect_loads() {
  auto [plain, parallel] = twins<Net>(1);
  auto other = seeded(2, [] { return Net(); });
  auto third = seeded(3, [] { return Net(); });
  parallelize_module(parallel, mesh_of_all(), up_and_down());
  const auto* identity = parallel->up->weight.unsafeGetTensorImpl();

  const auto own = state_dict(parallel);
  EXPECT_EQ(DTensor::of(own["up.weight"]).placements(), Placements{Shard(0)});
  EXPECT_EQ(DTensor::of(own["down.weight"]).placements(), Placements{Shard(1)});
  EXPECT_FALSE(is_dtensor(own["norm.running_mean"]));
  expect_values(parallel, plain, "distributed");

  EXPECT_TRUE(load_state_dict(parallel, state_dict(other)).empty());
  expect_values(parallel, other, "plain values");
  EXPECT_EQ(parallel->up->weight.unsafeGetTensorImpl(), identity) << "in place";

  StateDict placed_otherwise;
  for (const auto& [name, tensor] : state_dict(third)) {
    placed_otherwise[name] =
        name.ends_with("weight")
            ? at::Tensor(distribute_tensor(tensor, mesh_of_all(), {Shard(0)}, std::nullopt))
            : tensor;
  }
  load_state_dict(parallel, placed_otherwise);
  expect_values(parallel, third, "values that are placed otherwise");

  load_state_dict(other, state_dict(parallel));
  expect_values(other, third, "distributed values into a plain model");

  StateDict doubles;
  for (const auto& [name, tensor] : state_dict(plain))
    doubles[name] = tensor.is_floating_point() ? tensor.to(torch::kDouble) : tensor;
  load_state_dict(parallel, doubles);
  expect_values(parallel, plain, "another dtype");
}

TEST(ParallelStateDictOnThreads, LoadsPlainAndDistributedValuesOn2) {
  run_threads(2, expect_loads);
}
TEST(ParallelStateDict, LoadsPlainAndDistributedValuesOn4) { run_processes(4, expect_loads); }

TEST(ParallelStateDict, LoadsValuesOfAnotherMesh) {
  run_processes(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    auto parallel = seeded(1, [] { return Net(); });
    auto other = seeded(2, [] { return Net(); });
    parallelize_module(parallel, mesh["tp"], up_and_down());
    StateDict dict;
    for (const auto& [name, tensor] : state_dict(other)) {
      dict[name] = tensor.dim() == 2
                       ? at::Tensor(distribute_tensor(tensor, mesh, {Shard(0), Shard(1)}))
                       : tensor;
    }
    load_state_dict(parallel, dict);
    expect_values(parallel, other, "of the whole mesh");
  });
}

void expect_packed() {
  const int64_t ranks = world_size();
  auto [plain, parallel] = twins<nn::Linear>(1, torch::nn::LinearOptions(6, 24));
  parallelize_module(parallel, mesh_of_all(), ColwiseParallel({.packed = 3}));
  const auto saved = state_dict(parallel);
  expect_bitwise_equal(unpack_rows(full_value(saved["weight"]), 3, ranks), plain->weight.detach(),
                       "state dicts hold rows in the order of ranks");
  EXPECT_THAT(message_of([&] { load_state_dict(parallel, state_dict(plain)); }),
              AllOf(HasSubstr("load_state_dict: "), HasSubstr("'weight'"),
                    HasSubstr("packed in 3 parts"), HasSubstr("pack_rows")));
  StateDict packed;
  for (const auto& [name, tensor] : state_dict(plain)) {
    packed[name] =
        distribute_tensor(pack_rows(tensor * 2, 3, ranks), mesh_of_all(), {Shard(0)}, std::nullopt);
  }
  load_state_dict(parallel, packed);
  const auto x = torch::sin(torch::arange(12, torch::kFloat)).view({2, 6});
  const auto expected = plain(x).view({2, 3, -1}) * 2;
  const auto own = expected.chunk(ranks, 2)[rank()];
  expect_equal(parallel(x).detach(), own.reshape({2, -1}).detach());
}

TEST(ParallelStateDictOnThreads, RowsOfPackedWeightsAreNotMixedUpOn2) {
  run_threads(2, expect_packed);
}
TEST(ParallelStateDictOnThreads, RowsOfPackedWeightsAreNotMixedUpOn4) {
  run_threads(4, expect_packed);
}

TEST(ParallelStateDictOnThreads, ErrorsNameTheParameter) {
  run_threads(2, [] {
    auto parallel = seeded(1, [] { return Net(); });
    parallelize_module(parallel, mesh_of_all(), up_and_down());
    auto dict = state_dict(seeded(2, [] { return Net(); }));
    dict["up.weight"] = torch::zeros({7, 5});
    EXPECT_THAT(message_of<c10::Error>([&] { load_state_dict(parallel, dict); }),
                AllOf(HasSubstr("up.weight (expected [7, 6], got [7, 5])"),
                      HasSubstr("nothing was loaded")));
  });
}

TEST(ParallelStateDictOnThreads, LibtorchsOwnFunctionsRefuseRatherThanSaveAPart) {
  run_threads(2, [] {
    auto parallel = seeded(1, [] { return Net(); });
    std::stringstream plain;
    torch::save(parallel, plain);
    parallelize_module(parallel, mesh_of_all(), up_and_down());
    std::stringstream out;
    EXPECT_THAT(message_of<c10::Error>([&] { torch::save(parallel, out); }),
                HasSubstr("a DTensor has no memory of its own"));
    EXPECT_THROW(torch::load(parallel, plain), c10::Error);
    EXPECT_THROW(parallel->clone(), c10::Error);
    EXPECT_THAT(message_of<c10::Error>([&] { clone_module(parallel); }),
                HasSubstr("parallelize_module applied"));
    EXPECT_TRUE(is_dtensor(parallel->up->weight));
  });
}

TEST(ParallelOptimizerOnThreads, StateFromBeforeIsRefusedByName) {
  run_threads(2, [] {
    const auto refuse = [](const auto& make, const char* text) {
      MlpModule net;
      auto optimizer = make(net->parameters());
      net(torch::ones({2, 10})).sum().backward();
      optimizer.step();  // its states are plain tensors
      parallelize_module(net, mesh_of_all(),
                         {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
      net(torch::ones({2, 10})).sum().backward();
      EXPECT_THAT(message_of<c10::Error>([&] { optimizer.step(); }), HasSubstr(text));
    };
    const char* mix = "got a mix of distributed and plain tensors";
    refuse([](auto parameters) { return torch::optim::Adam(parameters, 0.1); }, mix);
    refuse([](auto parameters) { return optim::Adam(parameters); }, mix);
    refuse([](auto parameters) { return optim::AdamW(parameters, {.fused = true}); }, mix);
  });
}

}  // namespace
}  // namespace tessera::testing
