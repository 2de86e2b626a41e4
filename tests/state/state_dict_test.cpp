#include <tessera/nn.h>
#include <tessera/state_dict.h>

#include "support/peer.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::testing {
namespace {

using Names = std::vector<std::string>;

struct BranchImpl : torch::nn::Module {
  explicit BranchImpl(int64_t width) {
    // Children before parameters and buffers: the order of state dicts does not depend on it.
    fc = register_module("fc", nn::Linear(torch::nn::LinearOptions(width, 2).bias(false)));
    scratch = tessera::register_buffer(*this, "scratch", at::zeros({3}), /*persistent=*/false);
    mean = register_buffer("mean", at::zeros({2}));
    scale = register_parameter("scale", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(x) * scale + mean; }
  nn::Linear fc{nullptr};
  at::Tensor scratch, mean, scale;
};
TESSERA_MODULE(Branch);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    b = register_module("b", Branch(3));
    a = register_module("a", Branch(3));
    norm = register_module("norm", nn::BatchNorm1d(2));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(a(x) + b(x)); }
  Branch a{nullptr}, b{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TESSERA_MODULE(Net);

Names names_of(const StateDict& dict) {
  Names names;
  for (const auto& [name, tensor] : dict) names.push_back(name);
  return names;
}

TEST(StateDict, ParametersThenBuffersThenChildrenWithoutWhatIsNotPersistent) {
  Net net;
  EXPECT_EQ(
      names_of(state_dict(net)),
      (Names{"b.scale", "b.mean", "b.fc.weight", "a.scale", "a.mean", "a.fc.weight", "norm.weight",
             "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}));
  EXPECT_EQ(names_of(state_dict(*net)), names_of(state_dict(net.ptr())));
}

TEST(StateDict, SharesMemoryAndIsDetached) {
  Net net;
  const auto dict = state_dict(net);
  EXPECT_FALSE(dict["a.scale"].requires_grad());
  dict["a.scale"].fill_(7);
  expect_bitwise_equal(net->a->scale.detach(), at::full({2}, 7.0));
  EXPECT_TRUE(net->a->scale.requires_grad());
}

TEST(StateDict, IsAnOrderedMap) {
  StateDict dict = {{"x", at::ones({1})}, {"y", at::zeros({1})}};
  EXPECT_EQ(dict.size(), 2U);
  EXPECT_TRUE(dict.contains("x"));
  EXPECT_EQ(dict.find("z"), nullptr);
  dict["z"] = at::ones({3});
  dict["x"] = at::ones({2});
  EXPECT_EQ(names_of(dict), (Names{"x", "y", "z"}));
  EXPECT_EQ(dict.find("x")->numel(), 2);
  EXPECT_TRUE(dict.erase("y"));
  EXPECT_FALSE(dict.erase("y"));
  EXPECT_EQ(names_of(dict), (Names{"x", "z"}));
  EXPECT_EQ(std::as_const(dict)["z"].numel(), 3);
  EXPECT_TRUE(StateDict().empty());
}

TEST(StateDict, LoadsIntoASecondModule) {
  Net source, target;
  source(at::randn({4, 3}));
  const auto weight = target->a->fc->weight;
  const auto report = load_state_dict(target, state_dict(source));
  EXPECT_TRUE(report.empty());
  for (const auto& [name, tensor] : state_dict(source))
    expect_bitwise_equal(state_dict(target)[name], tensor, name);
  EXPECT_TRUE(target->a->fc->weight.is_same(weight)) << "parameters keep their identity";
  EXPECT_TRUE(weight.requires_grad());
  source->eval();
  target->eval();
  const auto x = at::randn({4, 3});
  expect_bitwise_equal(target(x), source(x));
}

TEST(StateDict, ConvertsDtypes) {
  nn::Linear source(3, 2), target(3, 2);
  source->to(at::kDouble);
  load_state_dict(target, state_dict(source));
  EXPECT_EQ(target->weight.scalar_type(), at::kFloat);
  expect_bitwise_equal(target->weight, source->weight.to(at::kFloat));
}

TEST(StateDict, LoadsWhatFitsAndReportsTheRest) {
  Net net;
  auto dict = state_dict(Net());
  dict.erase("b.mean");
  dict["extra"] = at::ones({1});
  dict["a.scale"] = at::ones({3});
  dict["a.mean"] = at::full({2}, 4.0);
  dict["norm.bias"] = at::Tensor();
  const auto report = load_state_dict(net, dict, {.strict = false});
  EXPECT_EQ(report.missing, (Names{"b.mean", "norm.bias"}));
  EXPECT_EQ(report.unexpected, (Names{"extra"}));
  ASSERT_EQ(report.mismatched.size(), 1U);
  EXPECT_EQ(report.mismatched[0].name, "a.scale");
  EXPECT_EQ(report.mismatched[0].expected, (std::vector<int64_t>{2}));
  EXPECT_EQ(report.mismatched[0].got, (std::vector<int64_t>{3}));
  expect_bitwise_equal(net->a->mean, at::full({2}, 4.0));
}

TEST(StateDictErrors, StrictListsEverythingAndChangesNothing) {
  Net net;
  auto dict = state_dict(Net());
  dict.erase("b.mean");
  dict["extra"] = at::ones({1});
  dict["a.scale"] = at::ones({3});
  dict["a.mean"] = at::full({2}, 4.0);
  try {
    load_state_dict(net, dict);
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()),
              "load_state_dict: expected the names and shapes of " + net->name() +
                  "; missing: b.mean; unexpected: extra; of another shape: a.scale (expected [2], "
                  "got [3]); nothing was loaded; correct the dict, or load what fits with {.strict "
                  "= false}");
  }
  expect_bitwise_equal(net->a->mean, at::zeros({2}));
}

TEST(StateDictErrors, UnknownAndTakenNames) {
  StateDict dict = {{"x", at::ones({1})}};
  EXPECT_THROW(std::as_const(dict)["y"], c10::ValueError);
  EXPECT_THROW(dict.insert("x", at::ones({1})), c10::ValueError);
}

/// "name [shape]" of every entry, in order.
std::string listing(const StateDict& dict) {
  std::ostringstream text;
  for (const auto& [name, tensor] : dict) {
    text << name;
    for (const auto size : tensor.sizes()) text << " " << size;
    text << "\n";
  }
  return text.str();
}

constexpr const char* kScript = R"(
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 2)
        self.norm = torch.nn.BatchNorm2d(4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4))
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros(1))
        self.lstm = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        self.table = torch.nn.Embedding(5, 3)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.PReLU()])
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.again = self.table
text = "".join(" ".join([name, *map(str, tensor.shape)]) + "\n" for name, tensor in Net().state_dict().items())
outputs["listing"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
)";

struct AsInPythonImpl : torch::nn::Module {
  AsInPythonImpl() {
    register_module("conv", nn::Conv2d(3, 4, 2));
    register_module("norm", nn::BatchNorm2d(4));
    register_module("body", nn::Sequential(nn::Linear(4, 4), nn::ReLU(),
                                           nn::LayerNorm(torch::nn::LayerNormOptions({4}))));
    tessera::register_buffer(*this, "mask", at::zeros({2}), /*persistent=*/false);
    register_buffer("count", at::zeros({1}));
    register_module("lstm",
                    nn::LSTM(torch::nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true)));
    register_module("attention", nn::MultiheadAttention(8, 2));
    register_module("layer",
                    nn::TransformerEncoderLayer(
                        torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16)));
    nn::Embedding table(5, 3);
    register_module("table", table);
    register_module("blocks", nn::ModuleList(nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)),
                                             nn::PReLU()));
    register_parameter("scale", at::ones({2}));
    register_module("again", table);
  }
  at::Tensor forward(at::Tensor x) { return x; }
};
TESSERA_MODULE(AsInPython);

TEST(StateDictPeer, NamesOrderAndShapesAsInPython) {
  if (auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto python = run_peer(kScript);
  ASSERT_TRUE(python.ok());
  const auto& bytes = python["listing"];
  const std::string expected(static_cast<const char*>(bytes.data_ptr()), bytes.numel());
  EXPECT_EQ(listing(state_dict(AsInPython())), expected);
}

}  // namespace
}  // namespace tessera::testing
