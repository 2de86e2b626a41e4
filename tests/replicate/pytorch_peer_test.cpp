// The same training by PyTorch's own DistributedDataParallel, from the same wheel.
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "support/peer.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

namespace tessera::testing {
namespace {

constexpr int kSteps = 20;
constexpr int64_t kRows = 4;

constexpr const char* kDdpScript = R"py(
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
init_process_group(backend="gloo")
unused = bool(inputs["unused"].item())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 64)
        self.mid = nn.Linear(64, 64)
        self.side = nn.Linear(64, 64)
        self.down = nn.Linear(64, 3)
    def forward(self, x, side):
        h = torch.tanh(self.up(x))
        h = self.side(h) if side else self.mid(h)
        return self.down(torch.tanh(h))
torch.manual_seed(42)
model = Model()
if not unused:
    del model.side
ddp = DDP(model, find_unused_parameters=unused)
if inputs["fp16"].item():
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
parameters = list(model.parameters())
which = int(inputs["optimizer"].item())
optimizer = [torch.optim.SGD(parameters, lr=0.05), torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
             torch.optim.Adam(parameters, lr=0.01)][which]
data, target = inputs["data"], inputs["target"]
accumulate = int(inputs["accumulate"].item())
for step in range(data.shape[0]):
    side = unused and (step + rank) % 2 == 1
    last = step % accumulate == accumulate - 1
    ddp.require_backward_grad_sync = last
    loss = nn.functional.mse_loss(ddp(data[step, rank], side), target[step, rank])
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
outputs.update({name: p.detach() for name, p in model.named_parameters()})
)py";

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(bool has_side) {
    up = register_module("up", nn::Linear(10, 64));
    mid = register_module("mid", nn::Linear(64, 64));
    // Drawn in any case: the layers after it start from the same random numbers as the peer's.
    side = nn::Linear(64, 64);
    if (has_side) register_module("side", side);
    down = register_module("down", nn::Linear(64, 3));
  }
  at::Tensor forward(const at::Tensor& x, bool goes_aside) {
    const auto h = up(x).tanh();
    return down((goes_aside ? side(h) : mid(h)).tanh());
  }
  nn::Linear up{nullptr}, mid{nullptr}, side{nullptr}, down{nullptr};
};
TESSERA_MODULE(Model);

struct DdpCase {
  const char* name;
  int optimizer;  // SGD, SGD with momentum, Adam
  int ranks = 2;
  int accumulate = 1;
  bool unused = false;
  bool fp16 = false;
};
void PrintTo(const DdpCase& which, std::ostream* out) {
  *out << which.name;
}  // NOLINT: gtest's name

std::unique_ptr<torch::optim::Optimizer> make_optimizer(int which, const Model& model) {
  if (which == 2)
    return std::make_unique<optim::Adam>(model->parameters(), optim::AdamOptions{.lr = 0.01});
  return std::make_unique<optim::SGD>(
      model->parameters(), optim::SGDOptions{.lr = 0.05, .momentum = which == 1 ? 0.9 : 0.0});
}

Tensors train(const DdpCase& which, const at::Tensor& data, const at::Tensor& target) {
  auto model = seeded(42, [&] { return Model(which.unused); });
  replicate(model, {.find_unused_parameters = which.unused});
  if (which.fp16) register_comm_hook(model, fp16_compress_hook);
  const auto optimizer = make_optimizer(which.optimizer, model);
  for (int64_t step = 0; step < data.size(0); ++step) {
    const bool is_last = step % which.accumulate == which.accumulate - 1;
    set_requires_gradient_sync(model, is_last);
    const auto output = model(data[step][rank()], which.unused && (step + rank()) % 2 == 1);
    torch::mse_loss(output, target[step][rank()]).backward();
    if (!is_last) continue;
    optimizer->step();
    optimizer->zero_grad();
  }
  Tensors result;
  for (const auto& item : model->named_parameters()) result[item.key()] = item.value().detach();
  return result;
}

class DdpPeer : public ::testing::TestWithParam<DdpCase> {};
INSTANTIATE_TEST_SUITE_P(PyTorch, DdpPeer,
                         ::testing::Values(DdpCase{"Sgd", 0}, DdpCase{"Momentum", 1},
                                           DdpCase{"Adam", 2}, DdpCase{"SgdOn4", 0, 4},
                                           DdpCase{"AdamOn4", 2, 4},
                                           DdpCase{"Accumulation", 1, 2, 4},
                                           DdpCase{"Unused", 1, 2, 1, true},
                                           DdpCase{"UnusedOn4", 2, 4, 1, true},
                                           DdpCase{"Fp16Hook", 0, 2, 1, false, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(DdpPeer, TrainsToTheSameParameters) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto& which = GetParam();
  torch::manual_seed(7);
  const auto data = torch::randn({kSteps, which.ranks, kRows, 10});
  const auto target = torch::randn({kSteps, which.ranks, kRows, 3});
  const auto number = [](double value) { return torch::tensor({value}); };
  const auto peers = run_peers(which.ranks, kDdpScript,
                               {{"data", data},
                                {"target", target},
                                {"optimizer", number(which.optimizer)},
                                {"accumulate", number(which.accumulate)},
                                {"unused", number(which.unused)},
                                {"fp16", number(which.fp16)}});
  std::mutex mutex;
  std::vector<Tensors> ours(which.ranks);
  run_threads(which.ranks, [&] {
    auto result = train(which, data, target);
    const std::lock_guard lock(mutex);
    ours[rank()] = std::move(result);
  });
  // fp16: PyTorch divides before it rounds and adds up in float16, we average in float32.
  const double tolerance = which.fp16 ? 2e-3 : which.optimizer == 2 ? 2e-4 : 1e-5;
  for (int rank = 0; rank < which.ranks; ++rank) {
    ASSERT_EQ(ours[rank].size(), which.unused ? 8U : 6U);
    for (const auto& [name, value] : ours[rank]) {
      EXPECT_TRUE(at::equal(value, ours[0].at(name))) << name << " differs between our ranks";
      const auto error = (value - peers[rank][name]).abs().max().item<double>();
      EXPECT_LT(error, tolerance) << name << " on rank " << rank;
    }
  }
}

}  // namespace
}  // namespace tessera::testing
