// Muon and Adafactor against Python's.
#include <tessera/tessera.h>

#include "optim/peer_training.h"
#include "support/peer.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

namespace tessera::optim {
namespace {

using testing::DrivenParameters;
using testing::expect_driving_as_in_python;
using testing::PeerCase;
using Params = std::vector<at::Tensor>;

/// Gradients of 30 steps for parameters of these shapes.
DrivenParameters driven(const std::vector<std::vector<int64_t>>& shapes, at::ScalarType dtype) {
  at::manual_seed(11);
  DrivenParameters parameters;
  for (const auto& shape : shapes) {
    parameters.values.push_back(at::randn(shape).to(dtype));
    std::vector<int64_t> all = {30};
    all.insert(all.end(), shape.begin(), shape.end());
    parameters.gradients.push_back(at::randn(all).mul(0.3).to(dtype));
  }
  return parameters;
}

/// A name without what ends Python's strings.
std::string unquoted(std::string text) {
  std::erase(text, '\'');
  return text;
}

PeerCase muon(const std::string& python, MuonOptions options) {
  return {"muon " + unquoted(python), "torch.optim.Muon(params, " + python + ")",
          [options](Params params) { return std::make_unique<Muon>(std::move(params), options); }};
}

std::vector<PeerCase> muons() {
  return {muon("lr=0.02", {.lr = 0.02}),
          muon("lr=0.02, nesterov=False, weight_decay=0",
               {.lr = 0.02, .weight_decay = 0, .nesterov = false}),
          muon("lr=0.02, adjust_lr_fn='original', momentum=0.8",
               {.lr = 0.02, .momentum = 0.8, .adjust_lr_fn = "original"}),
          muon("lr=0.02, adjust_lr_fn='match_rms_adamw'",
               {.lr = 0.02, .adjust_lr_fn = "match_rms_adamw"}),
          muon("lr=0.02, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3, eps=1e-3",
               {.lr = 0.02, .ns_coefficients = {2.0, -1.5, 0.5}, .eps = 1e-3, .ns_steps = 3})};
}

TEST(OptimPeer, MuonOfSingleMatrices) {
  expect_driving_as_in_python(driven({{16, 24}, {40, 8}, {33, 33}, {1, 7}, {65, 1}}, at::kFloat),
                              muons());
}

TEST(OptimPeer, MuonOfMatricesThatAreIteratedTogether) {
  expect_driving_as_in_python(
      driven({{16, 24}, {40, 8}, {16, 24}, {40, 8}, {16, 24}, {31, 7}, {31, 7}}, at::kFloat),
      muons());
}

TEST(OptimPeer, MuonOfHalfPrecisionAndLateGradients) {
  auto parameters = driven({{16, 24}, {16, 24}, {9, 5}}, at::kBFloat16);
  parameters.first = {0, 9, 3};
  // Python's own rounds the momentum without nesterov in place, since it is bfloat16 already.
  expect_driving_as_in_python(parameters, {muon("lr=0.02", {.lr = 0.02})});
}

PeerCase adafactor(const std::string& python, AdafactorOptions options) {
  return {
      "adafactor " + python, "torch.optim.Adafactor(params, " + python + ")",
      [options](Params params) { return std::make_unique<Adafactor>(std::move(params), options); }};
}

std::vector<PeerCase> adafactors() {
  return {adafactor("lr=0.01", {}),
          adafactor("lr=0.3, weight_decay=0.1", {.lr = 0.3, .weight_decay = 0.1}),
          adafactor("lr=0.05, maximize=True, d=2.0", {.lr = 0.05, .d = 2, .maximize = true}),
          adafactor("lr=0.05, beta2_decay=-0.5, eps=(1e-6, 1e-2)",
                    {.lr = 0.05, .beta2_decay = -0.5, .eps = {1e-6, 1e-2}})};
}

TEST(OptimPeer, AdafactorOfEveryShape) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    expect_driving_as_in_python(
        driven({{16, 24}, {7}, {1}, {5, 1}, {3, 9, 4}, {2, 3, 4, 5}}, dtype), adafactors());
}

TEST(OptimPeer, AdafactorOfLateGradients) {
  auto parameters = driven({{16, 24}, {8, 8}, {9}}, at::kFloat);
  parameters.first = {0, 9, 3};
  expect_driving_as_in_python(parameters, adafactors());
}

constexpr const char* kSave = R"(
def save(path, make):
    torch.manual_seed(7)
    net = torch.nn.Linear(6, 4, bias=False)
    optimizer = make(net.parameters())
    for step in range(4):
        if step == 3:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
        optimizer.zero_grad()
        net(inputs["x"][step]).square().mean().backward()
        optimizer.step()
    outputs[path] = net.weight.detach()
)";

/// A step after three of Python's, from what it has saved.
template <class Kind, class Options>
void expect_goes_on(const std::string& python, const Options& options) {
  if (const auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  const testing::TemporaryFolder folder;
  const auto file = (folder.path() / "saved.pt").string();
  const auto x = testing::seeded(3, [] { return at::randn({4, 8, 6}); });
  const auto result = testing::run_peer(
      kSave + ("save('" + file + "', lambda params: torch.optim." + python + ")\n"), {{"x", x}});
  ASSERT_TRUE(result.ok());
  torch::nn::Linear net(torch::nn::LinearOptions(6, 4).bias(false));
  Kind optimizer(net->parameters(), options);
  import_torch(file, net, {.key = "net"});
  import_torch_optimizer(file, net, optimizer, {.key = "optimizer"});
  net->forward(x[3]).square().mean().backward();
  optimizer.step();
  testing::expect_bitwise_equal(net->weight.detach(), result[file]);
}

TEST(OptimPeer, TrainingGoesOnFromPythonsStateOfMuon) {
  expect_goes_on<Muon>("Muon(params, lr=0.1, adjust_lr_fn='match_rms_adamw')", MuonOptions{});
}

TEST(OptimPeer, TrainingGoesOnFromPythonsStateOfAdafactor) {
  expect_goes_on<Adafactor>("Adafactor(params, lr=0.1, eps=(None, 1e-2))", AdafactorOptions{});
}

}  // namespace
}  // namespace tessera::optim
