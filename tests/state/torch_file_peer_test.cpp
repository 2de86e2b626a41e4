// Files that Python's own torch.save wrote.
#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/peer.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class TorchFilePeer : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto reason = peer_missing()) GTEST_SKIP() << *reason;
  }

  std::string in(const std::string& name) const { return (folder_.path() / name).string(); }
  /// Runs Python, to which `folder` is known.
  PeerResult python(const std::string& script, const Tensors& inputs = {}) const {
    return run_peer("folder = '" + folder_.path().string() + "/'\n" + script, inputs);
  }
  std::string refused(const std::string& script) const {
    EXPECT_TRUE(python(script + "\n").ok());
    return message_of<c10::ValueError>([&] { read_torch(in("a.pt")); });
  }

  TemporaryFolder folder_;
};

TEST_F(TorchFilePeer, TensorsOfEveryDtypeHaveTheirBits) {
  for (const int protocol : {2, 3, 4, 5}) {
    const auto result = python(R"(
from collections import OrderedDict
torch.manual_seed(3)
x = torch.randn(3, 5) * 50
names = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
         "uint64", "bool", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
         "float8_e4m3fnuz"]
d = OrderedDict((n, x.abs().to(getattr(torch, n))) for n in names)
for n in names:
    outputs[n] = d[n].view(torch.uint8) if "float8" in n or n.startswith("uint") else d[n]
d["scalar"] = torch.tensor(2.5)
d["empty"] = torch.empty(0, 3)
d["parameter"] = torch.nn.Parameter(torch.ones(2))
d["transposed"] = x.t()
d["row"] = x[1]
d["expanded"] = torch.ones(1).expand(4)
d["conjugate"] = torch.tensor([1 + 2j]).conj()
d["negative"] = torch.tensor([1 + 2j]).conj().imag
for n in ["scalar", "empty", "parameter", "transposed", "row", "expanded", "conjugate", "negative"]:
    outputs[n] = d[n].detach().resolve_conj().resolve_neg().contiguous()
torch.save(d, folder + "a.pt", pickle_protocol=)" +
                               std::to_string(protocol) + ")\n");
    ASSERT_TRUE(result.ok());
    const auto read = read_torch(in("a.pt"));
    ASSERT_EQ(read.size(), result.tensors.size());
    EXPECT_EQ(read.begin()->first, "float32");
    for (const auto& [name, tensor] : read) {
      const auto& expected = result[name];
      const bool as_bytes = expected.scalar_type() == at::kByte;
      auto value = tensor.resolve_conj().resolve_neg().contiguous();
      if (as_bytes) value = value.view(at::kByte);
      expect_bitwise_equal(value, expected, name);
      EXPECT_FALSE(tensor.requires_grad()) << name;
    }
    EXPECT_EQ(read["float8_e4m3fn"].scalar_type(), at::kFloat8_e4m3fn);
    EXPECT_EQ(read["uint16"].scalar_type(), at::kUInt16);
    EXPECT_EQ(read["transposed"].strides(), (at::IntArrayRef{1, 5}));
    EXPECT_TRUE(read["transposed"].is_alias_of(read["row"]));
    EXPECT_FALSE(read["scalar"].is_alias_of(read["row"]));
  }
}

TEST_F(TorchFilePeer, ModelsComeIn) {
  const auto x = at::randn({2, 3});
  const auto result = python(R"(
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
net(torch.randn(8, 3))
torch.save(net.state_dict(), folder + "a.pt")
torch.save({"model": net.state_dict(), "epoch": 3, "best": 0.5, "args": {"lr": [1e-3, None, True, "x"]},
            "ema": {"model": net.state_dict()}}, folder + "b.pt")
net.eval()
outputs["y"] = net(inputs["x"]).detach()
)",
                             {{"x", x}});
  ASSERT_TRUE(result.ok());
  const auto make = [] {
    nn::Sequential net(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Linear(4, 2));
    net->eval();
    return net;
  };
  auto net = make();
  EXPECT_TRUE(import_torch(in("a.pt"), net).empty());
  expect_equal(net->forward(x).detach(), result["y"]);
  for (const std::string key : {"model", "ema/model"}) {
    auto other = make();
    EXPECT_TRUE(import_torch(in("b.pt"), other, {.key = key}).empty());
    expect_equal(other->forward(x).detach(), result["y"]);
    EXPECT_EQ(read_torch(in("b.pt"), {.key = key}).size(), 9U);
  }
  run_threads(2, [&] {
    auto sharded = make();
    fully_shard(sharded);
    import_torch(in("a.pt"), sharded);
    for (const auto& [name, tensor] : state_dict(sharded))
      expect_bitwise_equal(tensor.cpu(), state_dict(net)[name], name);
  });
  EXPECT_THAT(message_of([&] { read_torch(in("b.pt")); }),
              HasSubstr("expected tensors by name alone, got 'model' (a dict), 'epoch' (an int), "
                        "'best' (a float), 'args' (a dict), 'ema' (a dict); give the key"));
  EXPECT_THAT(message_of([&] { read_torch(in("b.pt"), {.key = "net"}); }),
              HasSubstr("expected a dict with 'net' at key 'net', got 'model' (a dict)"));
  torch::nn::Linear other(3, 4);
  EXPECT_THAT(message_of([&] { import_torch(in("a.pt"), other); }),
              HasSubstr("missing: 'weight' and 'bias'; unexpected: '0.weight'"));
  const auto index = read_torch_index(in("b.pt"));
  EXPECT_EQ(index.tensors.size(), 18U);
  EXPECT_EQ(index.tensors[0].name, "model/0.weight");
}

TEST_F(TorchFilePeer, OptimizersGoOn) {
  for (const std::string kind : {"AdamW", "Adam", "SGD"}) {
    const auto result = python("kind = '" + kind + R"('
torch.manual_seed(5)
net = torch.nn.Linear(3, 4).double()
options = dict(lr=0.03, momentum=0.9) if kind == "SGD" else dict(lr=0.03, betas=(0.8, 0.95), amsgrad=True)
optimizer = getattr(torch.optim, kind)([{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias]}],
                                       **options)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
train(3)
torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, folder + "a.pt")
train(2)
outputs["weight"] = net.weight.detach()
)");
    ASSERT_TRUE(result.ok());
    const auto goes_on = [&](auto make) {
      torch::nn::Linear net(3, 4);
      net->to(at::kDouble);
      auto optimizer = make(std::vector<torch::optim::OptimizerParamGroup>{
          torch::optim::OptimizerParamGroup({net->weight}),
          torch::optim::OptimizerParamGroup({net->bias})});
      import_torch(in("a.pt"), net, {.key = "model"});
      import_torch_optimizer(in("a.pt"), net, optimizer, {.key = "optimizer"});
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        net(at::ones({2, 3}, at::kDouble)).square().sum().backward();
        optimizer.step();
      }
      EXPECT_LT((net->weight.detach() - result["weight"]).abs().max().template item<double>(),
                1e-12)
          << kind;
    };
    if (kind == "AdamW") {
      goes_on([](const auto& groups) { return optim::AdamW(groups); });
      goes_on([](const auto& groups) { return torch::optim::AdamW(groups); });
    } else if (kind == "Adam") {
      goes_on([](const auto& groups) { return optim::Adam(groups); });
    } else {
      goes_on([](const auto& groups) { return optim::SGD(groups); });
      goes_on([](const auto& groups) { return torch::optim::SGD(groups, 0.1); });
    }
    torch::nn::Linear other(3, 4);
    optim::Adam wrong(other->parameters());
    EXPECT_THAT(
        message_of([&] { import_torch_optimizer(in("a.pt"), other, wrong, {.key = "optimizer"}); }),
        HasSubstr("expected 1 groups of parameters, as the optimizer has, got 2"));
  }
}

TEST_F(TorchFilePeer, OptimizersOfAnotherKindAreRefusedByIt) {
  const auto told = [&](const std::string& saved, auto& net, torch::optim::Optimizer& optimizer) {
    return message_of<c10::ValueError>(
        [&] { import_torch_optimizer(in(saved + ".pt"), net, optimizer); });
  };
  ASSERT_TRUE(python(R"(
net = torch.nn.Linear(3, 4)
for kind in ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad"]:
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder + kind + ".pt")
older = torch.optim.AdamW(net.parameters()).state_dict()
older["param_groups"][0].pop("decoupled_weight_decay", None)
torch.save(older, folder + "older.pt")
)")
                  .ok());
  torch::nn::Linear net(3, 4);
  optim::SGD sgd(net->parameters());
  torch::optim::SGD stock(net->parameters(), 0.1);
  optim::AdamW adamw(net->parameters());
  for (const std::string saved : {"RMSprop", "Adagrad"}) {
    EXPECT_THAT(told(saved, net, sgd),
                HasSubstr("expected the state of SGD, got that of " + saved + ";"));
    EXPECT_THAT(told(saved, net, adamw),
                HasSubstr("expected the state of AdamW, got that of " + saved + ";"));
  }
  EXPECT_THAT(told("SGD", net, adamw), HasSubstr("expected the state of AdamW, got that of SGD;"));
  for (torch::optim::Optimizer* target : {static_cast<torch::optim::Optimizer*>(&sgd),
                                          static_cast<torch::optim::Optimizer*>(&stock)}) {
    for (const std::string saved : {"AdamW", "Adam"})  // older PyTorch does not tell them apart
      EXPECT_THAT(told(saved, net, *target),
                  HasSubstr("expected the state of SGD, got that of Adam"));
    EXPECT_THAT(told("older", net, *target),
                HasSubstr("expected the state of SGD, got that of Adam or AdamW;"));
  }
}

TEST_F(TorchFilePeer, WhatIsNotTensorsAndContainersIsRefused) {
  EXPECT_THAT(
      refused(R"(
import os
class Evil:
    def __reduce__(self): return (os.system, ("touch " + folder + "owned",))
torch.save({"w": torch.ones(1), "x": Evil()}, folder + "a.pt")
)"),
      HasSubstr("a.pt: expected tensors, dicts, lists, tuples, strings and numbers alone, got "
                "'posix.system'"));
  EXPECT_FALSE(std::filesystem::exists(in("owned")));
  EXPECT_THAT(refused("torch.save(torch.nn.Linear(2, 2), folder + 'a.pt')"),
              HasSubstr("save model.state_dict() alone"));
  EXPECT_THAT(refused("torch.save({'w': torch.eye(2).to_sparse()}, folder + 'a.pt')"),
              HasSubstr("expected dense tensors"));
  EXPECT_THAT(refused("torch.save(torch.ones(2), folder + 'a.pt')"),
              HasSubstr("expected a dict of tensors, got a tensor"));
  EXPECT_THAT(refused("torch.save({'w': torch.ones(2)}, folder + 'a.pt', "
                      "_use_new_zipfile_serialization=False)"),
              HasSubstr("got the older format; write it anew in Python"));
  EXPECT_THAT(refused("torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder + 'a.pt')"),
              HasSubstr("got a TorchScript archive"));
  EXPECT_THAT(refused(R"(
import os, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Replicate
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.save({"w": distribute_tensor(torch.ones(2), mesh, [Replicate()])}, folder + "a.pt")
dist.destroy_process_group()
)"),
              HasSubstr("such as a DTensor; save what get_model_state_dict"));
}

}  // namespace
}  // namespace tessera::testing
