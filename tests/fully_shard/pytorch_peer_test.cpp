// The same training by PyTorch's own fully_shard (FSDP2), from the same wheel.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "fully_shard/models.h"
#include "support/peer.h"
#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gtest/gtest.h>

#include <mutex>

namespace tessera::testing {
namespace {

constexpr int kSteps = 20;
constexpr int64_t kRows = 4;

/// Without scalars, which FSDP2 refuses.
struct PeerBlockImpl : torch::nn::Module {
  explicit PeerBlockImpl(int64_t width)
      : norm(register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 2 * width + 1))),
        down(register_module("down", nn::Linear(2 * width + 1, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(up(norm(x)).tanh()); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TESSERA_MODULE(PeerBlock);

struct PeerNetImpl : torch::nn::Module {
  explicit PeerNetImpl(int64_t width) : first(register_module("first", nn::Linear(5, width))) {
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) blocks->push_back(PeerBlock(width));
    last = register_module("last", nn::Linear(width, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = first(x);
    for (const auto& block : *blocks) x = block->as<PeerBlock>()->forward(x);
    return last(x);
  }
  nn::Linear first;
  nn::ModuleList blocks;
  nn::Linear last{nullptr};
};
TESSERA_MODULE(PeerNet);

struct PeerCase {
  const char* name;
  int ranks = 2;
  int64_t width = 7;  // no number of ranks divides it, nor 2 * 7 + 1 rows two ranks
  bool is_mixed = false;
  bool is_adam = false;
  int accumulate = 1;
  double max_norm = 0;  // 0: gradients are not clipped
  bool reshard = true;

  /// Gradients are then compared as well: weights are equal to the bit.
  bool is_one_step() const { return accumulate == kSteps; }
};
void PrintTo(const PeerCase& which, std::ostream* out) { *out << which.name; }  // NOLINT: gtest's

PeerNet make_net(const PeerCase& which) {
  auto net = seeded(42, [&] { return PeerNet(which.width); });
  FullyShardOptions options;
  if (which.is_mixed)
    options.mixed_precision = {.param_dtype = torch::kBFloat16,
                               .reduce_dtype = torch::kFloat,
                               .cast_forward_inputs = true};
  auto inner = options;
  inner.reshard_after_forward = which.reshard;
  for (const auto& block : *net->blocks) fully_shard(block, inner);
  fully_shard(net, options);
  return net;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(bool is_adam, const PeerNet& net) {
  if (is_adam)
    return std::make_unique<optim::Adam>(net->parameters(), optim::AdamOptions{.lr = 0.01});
  return std::make_unique<optim::SGD>(net->parameters(),
                                      optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
}

Tensors train(const PeerCase& which, const at::Tensor& data, const at::Tensor& target) {
  auto net = make_net(which);
  const auto optimizer = make_optimizer(which.is_adam, net);
  std::vector<at::Tensor> losses, norms;
  Tensors gradients;
  for (int64_t step = 0; step < data.size(0); ++step) {
    const bool is_last = step % which.accumulate == which.accumulate - 1;
    set_requires_gradient_sync(net, is_last);
    const auto output = net(data[step][rank()]).to(torch::kFloat);
    const auto loss = torch::mse_loss(output, target[step][rank()]);
    loss.backward();
    losses.push_back(loss.detach());
    if (!is_last) continue;
    for (const auto& item : net->named_parameters()) {
      if (which.is_one_step())
        gradients["gradient of " + item.key()] = whole(item.value().grad()).clone();
    }
    if (which.max_norm > 0)
      norms.push_back(whole(optim::clip_grad_norm_(net->parameters(), which.max_norm)));
    optimizer->step();
    optimizer->zero_grad();
  }
  auto result = std::move(gradients);
  for (const auto& item : net->named_parameters())
    result[item.key()] = whole(item.value()).detach();
  result["losses"] = torch::stack(losses);
  result["norms"] = norms.empty() ? torch::zeros({0}) : torch::stack(norms);
  return result;
}

std::vector<PeerResult> train_peers(const PeerCase& which, const at::Tensor& data,
                                    const at::Tensor& target) {
  const auto number = [](double value) { return torch::tensor({value}, torch::kDouble); };
  return run_peers(which.ranks, TESSERA_FULLY_SHARD_PEER,
                   {{"data", data},
                    {"target", target},
                    {"width", number(static_cast<double>(which.width))},
                    {"mixed", number(which.is_mixed)},
                    {"adam", number(which.is_adam)},
                    {"accumulate", number(which.accumulate)},
                    {"max_norm", number(which.max_norm)},
                    {"reshard", number(which.reshard)}});
}

std::vector<Tensors> train_ranks(const PeerCase& which, const at::Tensor& data,
                                 const at::Tensor& target) {
  std::mutex mutex;
  std::vector<Tensors> results(which.ranks);
  run_threads(which.ranks, [&] {
    auto result = train(which, data, target);
    const std::lock_guard lock(mutex);
    results[rank()] = std::move(result);
  });
  return results;
}

/// In float32 gradients differ by the order in which two or three ranks are added up; what that
/// makes of 20 steps is below 1e-5. Adam divides by the size of gradients, also of those that are
/// close to zero and therefore mostly rounding. With bfloat16 a weight that differs in the last bit
/// of float32 may round to the neighbour, which is 2^-8 away, before it is used.
Tolerance tolerance_for(const PeerCase& which) {
  if (which.is_one_step()) return {.rtol = 1e-4, .atol = 1e-5};
  if (which.is_mixed) return {.rtol = 4e-3, .atol = 4e-3};
  if (which.is_adam) return {.rtol = 1e-4, .atol = 1e-5};
  return {.rtol = 1e-5, .atol = 1e-6};
}

class Fsdp2Peer : public ::testing::TestWithParam<PeerCase> {};
INSTANTIATE_TEST_SUITE_P(
    PyTorch, Fsdp2Peer,
    ::testing::Values(
        PeerCase{.name = "Momentum"}, PeerCase{.name = "MomentumOn3", .ranks = 3},
        PeerCase{.name = "Adam", .is_adam = true},
        PeerCase{.name = "AdamOn3", .ranks = 3, .is_adam = true, .reshard = false},
        PeerCase{.name = "EmptyShards", .ranks = 4, .width = 5},
        PeerCase{.name = "MixedPrecision", .is_mixed = true},
        PeerCase{.name = "MixedPrecisionOn3", .ranks = 3, .is_mixed = true, .is_adam = true},
        PeerCase{.name = "Accumulation", .accumulate = 4},
        PeerCase{.name = "AccumulationOn3", .ranks = 3, .is_adam = true, .accumulate = 2},
        PeerCase{.name = "MixedPrecisionAccumulation", .is_mixed = true, .accumulate = kSteps},
        PeerCase{.name = "MixedPrecisionAccumulationOn3",
                 .ranks = 3,
                 .is_mixed = true,
                 .accumulate = kSteps},
        PeerCase{.name = "Clipping", .max_norm = 0.1},
        PeerCase{.name = "ClippingOn3", .ranks = 3, .max_norm = 0.1},
        PeerCase{
            .name = "Everything", .ranks = 3, .is_mixed = true, .accumulate = 2, .max_norm = 0.1}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(Fsdp2Peer, TrainsToTheSameParameters) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto& which = GetParam();
  torch::manual_seed(7);
  const auto data = torch::randn({kSteps, which.ranks, kRows, 5});
  const auto target = torch::randn({kSteps, which.ranks, kRows, 3});
  const auto peers = train_peers(which, data, target);
  const auto ours = train_ranks(which, data, target);
  for (int rank = 0; rank < which.ranks; ++rank) {
    // Parameters, their gradients, losses, norms.
    ASSERT_EQ(ours[rank].size(), 22U + (which.is_one_step() ? 22U : 0U) + 2U);
    ASSERT_EQ(ours[rank].at("norms").numel(), which.max_norm > 0 ? kSteps / which.accumulate : 0);
    for (const auto& [name, value] : ours[rank]) {
      expect_equal(value, peers[rank][name], name + " on rank " + std::to_string(rank),
                   tolerance_for(which));
      if (name != "losses") expect_bitwise_equal(value, ours[0].at(name), name + " on our ranks");
    }
  }
}

}  // namespace
}  // namespace tessera::testing
