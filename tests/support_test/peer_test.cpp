#include "support/peer.h"

#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <fstream>

namespace tessera::testing {

namespace {

TEST(Peer, TensorsTravelBothWaysBitForBit) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  Tensors inputs{{"special", at::tensor({NAN, -0.0F, INFINITY, 1e-45F})},
                 {"transposed", at::randn({3, 4}).t()},
                 {"scalar", at::tensor(2.5)},
                 {"empty", at::zeros({0, 3})},
                 {"bool", at::tensor({1, 0, 1}).to(at::kBool)},
                 {"slice", at::arange(10).slice(0, 2, 9, 3)}};
  for (const auto dtype :
       {at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt}) {
    inputs[std::string("dtype_") + at::toString(dtype)] = at::randn({5}).mul(20).abs().to(dtype);
  }
  inputs["complex"] = at::randn({2, 2}, at::kComplexFloat);
  const PeerResult result = run_peer("outputs.update(inputs)\nprint('hello from Python')", inputs);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.output, "hello from Python\n");
  EXPECT_EQ(result.tensors.size(), inputs.size());
  for (const auto& [name, tensor] : inputs) expect_bitwise_equal(result[name], tensor, name);
}

TEST(Peer, SameSeedGivesTheSameLinear) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  auto linear = seeded(42, [] { return torch::nn::Linear(7, 15); });
  const PeerResult result = run_peer(R"(
torch.manual_seed(42)
linear = torch.nn.Linear(7, 15)
outputs["weight"], outputs["bias"] = linear.weight, linear.bias
outputs["output"] = linear(inputs["input"])
)",
                                     {{"input", at::ones({2, 7})}});
  ASSERT_TRUE(result.ok());
  expect_bitwise_equal(linear->weight, result["weight"], "weight");
  expect_bitwise_equal(linear->bias, result["bias"], "bias");
  expect_bitwise_equal(linear->forward(at::ones({2, 7})), result["output"], "output");
}

TEST(Peer, AFailingScriptFailsTheTestWithItsOutput) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  EXPECT_NONFATAL_FAILURE(run_peer("raise ValueError('no tea left')"), "ValueError: no tea left");
}

TEST(Peer, ADeadlineKillsTheScript) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  EXPECT_NONFATAL_FAILURE(
      run_peer("import signal; signal.pause()", {}, {.deadline = std::chrono::seconds(1)}),
      "killed at the deadline");
}

TEST(Peer, RunsAScriptFile) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "double.py";
  std::ofstream(path) << "outputs['y'] = inputs['x'] * 2\n";
  expect_bitwise_equal(run_peer(path.string(), {{"x", at::ones({2})}})["y"], at::full({2}, 2.0));
}

TEST(Peer, SeveralRanksFormAWorld) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const std::vector<PeerResult> results = run_peers(2, R"(
import torch.distributed as dist
init_process_group()
total = inputs["x"] + rank
dist.all_reduce(total)
outputs["total"] = total
)",
                                                    {{"x", at::ones({2})}});
  ASSERT_EQ(results.size(), 2);
  for (const PeerResult& result : results)
    expect_bitwise_equal(result["total"], at::full({2}, 3.0));
}

}  // namespace

}  // namespace tessera::testing
