// Against Python's own `safetensors`.
#include <tessera/tessera.h>

#include "support/peer.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

namespace tessera::testing {
namespace {

std::optional<std::string> safetensors_missing() {
  static const auto reason = []() -> std::optional<std::string> {
    if (auto missing = peer_missing()) return missing;
    const auto result = run_peer(R"(
import importlib.util
outputs["found"] = torch.tensor(importlib.util.find_spec("safetensors") is not None)
)");
    if (result.ok() && result["found"].item<bool>()) return std::nullopt;
    return "Python has no package safetensors; run scripts/setup.sh";
  }();
  return reason;
}

const at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,  at::kBFloat16, at::kBool,
                                  at::kByte,  at::kChar,   at::kShort, at::kInt,      at::kLong};

Tensors sample_tensors() {
  Tensors tensors;
  for (const auto dtype : kDtypes) {
    tensors[std::string("of ") + c10::toString(dtype)] =
        (at::randn({3, 5}) * 50).to(dtype == at::kByte ? at::kInt : dtype).to(dtype);
  }
  tensors["scalar"] = at::scalar_tensor(2.5);
  tensors["empty"] = at::empty({0, 3});
  tensors["\"quoted\" ünïcode \xF0\x9F\xA6\x8A \\ \t"] = at::ones({2});
  return tensors;
}

StateDict dict_of(const Tensors& tensors) {
  StateDict dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  return dict;
}

TEST(SafetensorsPeer, PythonReadsOurFiles) {
  if (auto reason = safetensors_missing()) GTEST_SKIP() << *reason;
  const TemporaryFolder folder;
  const auto file = (folder.path() / "a.safetensors").string();
  const auto tensors = sample_tensors();
  write_safetensors(file, dict_of(tensors));
  const auto result = run_peer(
      "from safetensors.torch import load_file\noutputs.update(load_file('" + file + "'))");
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.tensors.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) expect_bitwise_equal(result[name], tensor, name);
  write_safetensors(file, {});
  EXPECT_TRUE(
      run_peer("from safetensors.torch import load_file\nassert load_file('" + file + "') == {}")
          .ok());
}

TEST(SafetensorsPeer, WeReadPythonsFiles) {
  if (auto reason = safetensors_missing()) GTEST_SKIP() << *reason;
  const TemporaryFolder folder;
  const auto file = (folder.path() / "a.safetensors").string();
  const auto tensors = sample_tensors();
  const auto result = run_peer("from safetensors.torch import save_file\nsave_file(inputs, '" +
                                   file + "', metadata={'format': 'pt', 'who': 'peer'})",
                               tensors);
  ASSERT_TRUE(result.ok());
  const auto read = read_safetensors(file);
  EXPECT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) expect_bitwise_equal(read[name], tensor, name);
  ASSERT_TRUE(
      run_peer("from safetensors.torch import save_file\nsave_file({}, '" + file + "')").ok());
  EXPECT_TRUE(read_safetensors(file).empty());
}

TEST(SafetensorsPeer, ModelsGoBothWays) {
  if (auto reason = safetensors_missing()) GTEST_SKIP() << *reason;
  const TemporaryFolder folder;
  const auto ours = (folder.path() / "ours.safetensors").string();
  const auto theirs = (folder.path() / "theirs.safetensors").string();
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  export_safetensors(ours, net);
  const auto x = at::randn({2, 3});
  const auto result = run_peer(R"(
from safetensors.torch import load_file, save_file
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
net.load_state_dict(load_file(')" + ours +
                                   R"('))
net.eval()
outputs["y"] = net(inputs["x"]).detach()
with torch.no_grad():
    net[0].weight.add_(1)
outputs["z"] = net(inputs["x"]).detach()
save_file(net.state_dict(), ')" + theirs +
                                   R"(')
)",
                               {{"x", x}});
  ASSERT_TRUE(result.ok());
  net->eval();
  expect_equal(net->forward(x).detach(), result["y"]);
  EXPECT_TRUE(import_safetensors(theirs, net).empty());
  expect_equal(net->forward(x).detach(), result["z"]);
}

TEST(SafetensorsPeer, PythonReadsTheFilesOfACheckpoint) {
  if (auto reason = safetensors_missing()) GTEST_SKIP() << *reason;
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  torch::nn::Linear net(3, 4);
  save(dir, net, {{"step", "17"}});
  const auto result =
      run_peer("from safetensors.torch import load_file\noutputs.update(load_file('" + dir +
               "/rank-00000-of-00001.safetensors'))");
  ASSERT_TRUE(result.ok());
  expect_bitwise_equal(result["weight"], net->weight.detach());
  expect_bitwise_equal(result["extra/step"], at::tensor({'1', '7'}, at::kByte));
}

}  // namespace
}  // namespace tessera::testing
