// Rows that hold several sequences: each is computed as if it were alone.
#include <tessera/checkpoint.h>
#include <tessera/models.h>
#include <tessera/parallelize.h>

#include "models/small_models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <vector>

namespace tessera::testing {
namespace {

using models::CausalLM;
using models::Family;

/// Of two rows: 5 and 3 tokens and 2 of padding; 10 tokens.
struct PackedBatch {
  at::Tensor tokens, targets, positions;
};

PackedBatch packed_batch() {
  return seeded(3, [] {
    const auto row = [](const std::vector<int64_t>& lengths) {
      std::vector<at::Tensor> parts;
      for (const auto length : lengths) parts.push_back(at::arange(length, at::kLong));
      return at::cat(parts);
    };
    PackedBatch batch{at::randint(61, {2, 10}, at::kLong), at::randint(61, {2, 10}, at::kLong),
                      at::stack({row({5, 3, 2}), row({10})})};
    batch.targets[0].narrow(0, 8, 2).fill_(-100);
    batch.targets[0][1] = -100;
    return batch;
  });
}

/// One sequence after the other, weighted by their targets.
at::Tensor loss_alone(CausalLM& net) {
  const auto batch = packed_batch();
  at::Tensor sum = at::zeros({});
  double count = 0;
  for (const auto& [row, first, length] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{0, 0, 5}, {0, 5, 3}, {1, 0, 10}}) {
    const auto part = [&, row = row, first = first, length = length](const at::Tensor& tensor) {
      return tensor[row].narrow(0, first, length).unsqueeze(0);
    };
    const auto targets = (part(batch.targets) >= 0).sum().item<double>();
    sum = sum + net->loss(part(batch.tokens), part(batch.targets)) * targets;
    count += targets;
  }
  return sum / count;
}

at::Tensor loss_packed(CausalLM& net) {
  const auto batch = packed_batch();
  return net->packed_loss(batch.tokens, batch.targets, batch.positions);
}

class PackedModel : public ::testing::TestWithParam<Family> {};

TEST_P(PackedModel, HasLossAndGradientsOfSequencesAlone) {
  auto alone = small_model(small_config(GetParam(), true)),
       packed = small_model(small_config(GetParam(), true));
  for (const auto& block : packed->blocks()) checkpoint(block);
  const auto expected = loss_alone(alone), got = loss_packed(packed);
  EXPECT_NEAR(got.item<double>(), expected.item<double>(), 1e-5);
  expected.backward();
  got.backward();
  const auto theirs = alone->named_parameters();
  for (const auto& item : packed->named_parameters())
    EXPECT_LE((item.value().grad() - theirs[item.key()].grad()).abs().max().item<double>(), 2e-5)
        << item.key();
}

TEST_P(PackedModel, OnThreadsIsThatOfOneRank) {
  const auto config = small_config(GetParam(), false);
  auto reference = small_model(config);
  const auto expected = loss_alone(reference).item<double>();
  run_threads(2, [&] {
    auto net = small_model(config);
    parallelize_module(net, init_device_mesh(at::kCPU, {2}), models::tensor_plan(net));
    const auto loss = loss_packed(net);
    EXPECT_NEAR(loss.item<double>(), expected, 1e-5);
    loss.backward();
  });
}

INSTANTIATE_TEST_SUITE_P(Families, PackedModel,
                         ::testing::Values(Family::GPT2, Family::Llama, Family::Qwen2,
                                           Family::Qwen3),
                         [](const auto& chosen) {
                           return std::string(models::name_of(chosen.param));
                         });

TEST(PackedModelErrors, OfPositions) {
  auto net = small_model(small_config(Family::Llama, true));
  const auto batch = packed_batch();
  EXPECT_NE(message_of([&] {
              net->packed_loss(batch.tokens, batch.targets, at::zeros({3}));
            }).find("expected a position for each token, got positions of [3]"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
