// Scaled gradients of distributed parameters: an overflow on one rank is one on all.
#include <tessera/optim.h>

#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Gradients of the shape [5, 3], with an infinity in the last row of the first if asked for.
Tensors gradients(const DeviceMesh& mesh, const std::vector<Placement>& placements, bool overflows,
                  bool with_plain) {
  Tensors tensors;
  for (const auto& placement : placements) {
    auto whole = numbered({5, 3});
    if (overflows && tensors.empty()) whole[4][0] = kInfinity;
    tensors.push_back(placed(whole, mesh, {placement}));
  }
  if (with_plain) tensors.push_back(numbered({2}));
  return tensors;
}

TEST(AmpOnThreads, AnOverflowOfOneRankIsFoundOnAll) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const std::vector<std::vector<Placement>> lists = {
        {Shard(0)}, {Replicate()}, {Shard(0), Replicate()}, {Shard(1), Shard(0)}};
    for (const auto& placements : lists) {
      for (const bool overflows : {false, true}) {
        for (const bool with_plain : {false, true}) {
          auto tensors = gradients(mesh, placements, overflows, with_plain);
          auto found = torch::zeros({});
          at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, torch::tensor(0.5F));
          EXPECT_EQ(found.item<float>(), overflows ? 1 : 0) << c10::str(Placements(placements));
          expect_equal(full_of(tensors[0])[0], numbered({5, 3})[0] * 0.5);
          if (with_plain) expect_equal(tensors.back(), numbered({2}) * 0.5);
        }
      }
    }
  });
}

TEST(AmpOnThreads, OverflowsTravelOverAllDimensionsOfAMesh) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    auto whole = numbered({4, 4});
    whole[3][3] = kInfinity;  // held by the last rank
    Tensors tensors{placed(whole, mesh, {Shard(0), Shard(1)})};
    auto found = torch::zeros({});
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, torch::tensor(2.0F));
    EXPECT_EQ(found.item<float>(), 1);
    Tensors of_two{
        placed(numbered({4}), init_device_mesh(torch::kCPU, {2, 2}, {"a", "b"})["b"], {Shard(0)}),
        placed(numbered({4, 4}), mesh, {Shard(0), Shard(1)})};
    auto none = torch::zeros({});
    at::_amp_foreach_non_finite_check_and_unscale_(of_two, none, torch::tensor(2.0F));
    EXPECT_EQ(none.item<float>(), 0) << "two meshes in one list";
  });
}

TEST(AmpOnThreads, PartialGradientsAreRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Tensors tensors{placed(numbered({4}), mesh, {Partial()})};
    auto found = torch::zeros({});
    EXPECT_THAT(message_of<c10::Error>([&] {
                  at::_amp_foreach_non_finite_check_and_unscale_(tensors, found,
                                                                 torch::tensor(2.0F));
                }),
                ::testing::HasSubstr("redistribute it first"));
  });
}

/// Trains a sharded, a replicated and a plain parameter; the second step overflows in an element
/// that the last rank holds.
void expect_agreed_steps(const DeviceMesh& mesh, const std::string& kind, bool unscales) {
  const auto train = [&](const Tensors& parameters, const auto& place) {
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (kind == "torch") optimizer = std::make_unique<torch::optim::SGD>(parameters, 0.1);
    if (kind == "sgd") optimizer = std::make_unique<optim::SGD>(parameters, optim::SGDOptions{});
    if (kind == "fused")
      optimizer = std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.fused = true});
    optim::GradScaler scaler({.device = torch::kCPU, .init_scale = 8, .growth_interval = 100});
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      auto factor = torch::cos(numbered({5, 3}));
      if (step == 1) factor[4][2] = kInfinity;
      auto loss = (parameters[0] * place(factor, Placement(Shard(0)))).sum() +
                  (parameters[1] * place(torch::sin(numbered({4})), Placement())).sum();
      scaler.scale(loss).backward();
      scaler.scale((parameters[2] * 3).sum()).backward();
      if (unscales) scaler.unscale_(*optimizer);
      scaler.step(*optimizer);
      scaler.update();
    }
    return scaler.get_scale();
  };
  const auto initial = [] { return Tensors{numbered({5, 3}), numbered({4}), numbered({2})}; };
  auto plain = initial();
  auto mixed = initial();
  for (auto& tensor : plain) tensor.requires_grad_();
  mixed[0] = placed(mixed[0], mesh, {Shard(0)});
  mixed[1] = placed(mixed[1], mesh, {Replicate()});
  for (auto& tensor : mixed) tensor.requires_grad_();
  const double expected = train(plain, [](const at::Tensor& whole, Placement) { return whole; });
  const double actual = train(mixed, [&](const at::Tensor& whole, Placement placement) {
    return at::Tensor(placed(whole, mesh, {placement}));
  });
  EXPECT_EQ(expected, 4) << "one step backed off";
  EXPECT_EQ(actual, expected) << kind;
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto whole = is_dtensor(mixed[i]) ? full_of(mixed[i]) : mixed[i].detach();
    expect_equal(whole, plain[i].detach(), c10::str(kind, " parameter ", i));
  }
}

TEST(AmpOnThreads, GradScalerSkipsTheStepOnAllRanks) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto* kind : {"torch", "sgd", "fused"}) {
      for (const bool unscales : {false, true}) expect_agreed_steps(mesh, kind, unscales);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
