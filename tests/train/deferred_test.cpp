// What lets a step be issued before the one before it is read: values on the device, messages
// between hosts, batches that are fetched ahead, updates that the device leaves out.
#include <tessera/comm.h>
#include <tessera/optim.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "train/batches.h"
#include "train/measured.h"
#include "train/random_state.h"
#include "train/utilization.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>

namespace tessera::train {
namespace {

using testing::expect_bitwise_equal;
using testing::run_threads;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

struct Measured : StepMessage {
  StepValues values;
};

Measured message_of(float loss, float norm, bool may_overflow = false,
                    const HostReport& own = {1}) {
  const auto values = values_of_all(at::scalar_tensor(loss, at::kFloat),
                                    at::scalar_tensor(norm, at::kFloat), may_overflow);
  return {StepMessage(values, own, may_overflow), values};
}

TEST(StepMessage, HasTheMeanLossOfAllRanksAndTheNormAsItIs) {
  run_threads(2, [] {
    const auto message = message_of(rank() == 0 ? 1.5F : 2.25F, 0.1F);
    EXPECT_EQ(message.loss(), 1.875);
    EXPECT_EQ(message.gradient_norm(), 0.1F);
    EXPECT_TRUE(message.is_finite());
    EXPECT_EQ(message.values.found_inf.item<float>(), 0);
  });
}

TEST(StepMessage, OfOneRankThatIsNotFiniteLeavesTheStepOutOnAll) {
  run_threads(2, [] {
    for (const float bad : {kInfinity, -kInfinity, kNotANumber}) {
      const auto lost = message_of(rank() == 1 ? bad : 2, 1);
      EXPECT_FALSE(lost.is_finite());
      EXPECT_EQ(lost.values.found_inf.item<float>(), 1);
      const auto exploded = message_of(2, rank() == 1 ? bad : 1);
      EXPECT_FALSE(exploded.is_finite());
      EXPECT_EQ(exploded.values.found_inf.item<float>(), 1);
      EXPECT_EQ(exploded.told().stop.signal, 0) << "the words beside it are not touched";
    }
  });
}

TEST(StepMessage, MayHaveANormThatOverflowsWhereAScalerLooksAtIt) {
  run_threads(1, [] {
    const auto overflown = message_of(2, kInfinity, /*may_overflow=*/true);
    EXPECT_TRUE(overflown.is_finite());
    EXPECT_EQ(overflown.values.found_inf.item<float>(), 0);
    EXPECT_FALSE(message_of(kNotANumber, 1, /*may_overflow=*/true).is_finite());
  });
}

TEST(StepMessage, TellsAllRanksTheSameWhenItIsReadAStepLater) {
  run_threads(3, [] {
    const auto message = [](double elapsed, bool has_saved) {
      return message_of(1, 1, false,
                        {.seconds = 2,
                         .communication = static_cast<double>(rank()),
                         .elapsed = elapsed + rank(),
                         .has_saved = has_saved});
    };
    const auto first = message(10, rank() != 1);
    const auto second = message(20, true);  // sent before the first one is read
    const auto told = first.told();
    EXPECT_EQ(told.elapsed, 10);  // by rank 0's clock
    EXPECT_EQ(told.communication, 0.5);
    EXPECT_FALSE(told.have_saved);
    EXPECT_EQ(told.stop.signal, 0);
    EXPECT_GT(told.memory, 0);
    EXPECT_EQ(second.told().elapsed, 20);
    EXPECT_TRUE(second.told().have_saved);
  });
}

TEST(KeptRandomState, DrawsTheSameNumbersAgain) {
  const auto before = at::rand({4});
  at::Tensor inside;
  {
    const KeptRandomState kept(at::kCPU);
    inside = at::rand({4});
  }
  expect_bitwise_equal(at::rand({4}), inside);
  EXPECT_FALSE(at::equal(before, inside));
}

TEST(DeviceEvent, OfTheCpuHasComeAndTellsTheTimeBetween) {
  const DeviceEvent earlier(at::kCPU);
  const double begun = now();
  while (now() - begun < 0.01) {
  }
  const DeviceEvent later(at::kCPU);
  EXPECT_TRUE(later.has_come());
  EXPECT_GE(later.seconds_since(earlier), 0.01);
}

/// Settings and text of a folder that goes with it.
class FetchedBatches : public ::testing::Test {
 protected:
  FetchedBatches() {
    std::ofstream text(folder_.path() / "text.txt");
    for (int i = 0; i < 200; ++i) text << "line " << i << "\n";
    settings_.data = {folder_.path().string()};
    settings_.context = 16;
    settings_.batch = 4;
  }

  Batches make() const {
    const auto device = testing::run_device();
    const Layout layout{.mesh = init_device_mesh(device.type(), {world_size()})};
    return {settings_, layout, device};
  }

  testing::TemporaryFolder folder_;
  Settings settings_;
};

TEST_F(FetchedBatches, AreTheSequencesInTheOrderOfTheSampler) {
  run_threads(1, [this] {
    auto batches = make();
    data::ShardedSampler sampler(batches.train_sequences(),
                                 {.seed = settings_.seed, .rank = 0, .world_size = 1});
    for (int i = 0; i < 80; ++i) {  // some epochs
      const auto expected = batches.sequences().read(sampler.next(4));
      const auto actual = batches.next();
      expect_bitwise_equal(actual.tokens.cpu(), expected.tokens);
      expect_bitwise_equal(actual.targets.cpu(), expected.targets);
      EXPECT_FALSE(actual.positions.defined());
      EXPECT_EQ(batches.position(), sampler.position())
          << "counts what was given, not what was read";
      EXPECT_EQ(batches.epoch(), sampler.epoch());
    }
    EXPECT_GT(batches.epoch(), 0);
  });
}

TEST_F(FetchedBatches, AreForgottenWhereARunGoesOnFromAnotherPlace) {
  run_threads(1, [this] {
    auto straight = make(), resumed = make();
    straight.next();
    const auto place = straight.position();
    const auto expected = straight.next();
    resumed.next();
    resumed.next();
    resumed.seek(place);
    expect_bitwise_equal(resumed.next().tokens.cpu(), expected.tokens.cpu());
  });
}

TEST(StepUnless, LeavesParametersStateAndCountsAloneOrIsAStep) {
  const auto parameter = [] { return at::ones({3}).set_requires_grad(true); };
  const auto trained = parameter(), reference = parameter();
  optim::AdamW optimizer({trained}, {.lr = 0.1, .fused = true});
  optim::AdamW plain({reference}, {.lr = 0.1, .fused = true});
  const auto step = [&](float found_inf, float gradient) {
    trained.mutable_grad() = at::full({3}, gradient);
    optimizer.step_unless(at::scalar_tensor(found_inf, at::kFloat));
  };
  step(1, kNotANumber);
  expect_bitwise_equal(trained.detach(), at::ones({3}));
  step(0, 0.5);
  step(1, kInfinity);
  step(0, 0.25);
  for (const float gradient : {0.5F, 0.25F}) {
    reference.mutable_grad() = at::full({3}, gradient);
    plain.step();
  }
  expect_bitwise_equal(trained.detach(), reference.detach());
  for (const auto& [name, value] : plain.state_of(reference))
    expect_bitwise_equal(optimizer.state_of(trained).at(name), value);
}

TEST(StepUnless, RefusesWhatCannotDecideOnTheDevice) {
  const auto parameter = at::ones({3}).set_requires_grad(true);
  optim::AdamW looped({parameter});
  EXPECT_THROW(looped.step_unless(at::zeros({}, at::kFloat)), c10::ValueError);
  optim::AdamW fused({parameter}, {.fused = true});
  EXPECT_THROW(fused.step_unless(at::zeros({}, at::kDouble)), c10::TypeError);
  EXPECT_THROW(fused.step_unless({}), c10::TypeError);
}

TEST(ScalerStep, IsLeftOutForAReasonOfTheCallersAsForAnOverflow) {
  const auto parameter = at::ones({2}).set_requires_grad(true);
  optim::AdamW optimizer({parameter}, {.lr = 0.1, .fused = true});
  optim::GradScaler scaler({.device = at::kCPU, .init_scale = 64});
  const auto train = [&](float found_inf) {
    optimizer.zero_grad();
    scaler.scale(parameter.sum()).backward();
    scaler.step(optimizer, at::scalar_tensor(found_inf, at::kFloat));
    scaler.update();
  };
  train(1);
  expect_bitwise_equal(parameter.detach(), at::ones({2}));
  EXPECT_EQ(scaler.get_scale(), 32);
  train(0);
  EXPECT_FALSE(at::equal(parameter, at::ones({2})));
  EXPECT_EQ(scaler.get_scale(), 32);
}

TEST(Utilization, CountsWeightsOfProductsAndAttention) {
  const TokenWork work{.weights = 1000, .blocks = 2, .attention_width = 8, .context = 4};
  EXPECT_EQ(flops_per_token(work), 6 * 1000 + 12 * 2 * 8 * 4);
}

TEST(Utilization, KnowsDevicesByTheWordsOfTheirNames) {
  EXPECT_EQ(peak_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(peak_flops("NVIDIA GeForce RTX 4090"), 165e12);
  EXPECT_EQ(peak_flops("NVIDIA RTX A1000"), std::nullopt);
  EXPECT_EQ(peak_flops(""), std::nullopt);
}

TEST(Utilization, MeasuresAPeakWithoutDrawingNumbers) {
  const auto generator = at::globalContext().defaultGenerator(at::kCPU);
  run_threads(2, [&] {
    const auto before = generator.get_state();
    const double peak = measured_peak(at::kCPU, "fp32");
    EXPECT_GT(peak, 1e8);
    EXPECT_LT(peak, 1e15);
    EXPECT_TRUE(at::equal(generator.get_state(), before));
    EXPECT_EQ(gather_bytes(std::to_string(peak))[0], gather_bytes(std::to_string(peak))[1]);
  });
}

TEST(Utilization, CountsDevicesByUuidNotByIndex) {
  const auto device = [](const char* uuid, int index, const char* host = "a") {
    return UsedDevice{.uuid = uuid, .name = "NVIDIA H200", .host = host, .index = index};
  };
  // One GPU visible to each rank: index 0 everywhere.
  const auto apart = merge_devices({device("GPU-1", 0), device("GPU-2", 0)});
  EXPECT_EQ(peak_of(apart, "bf16"), 2 * 989e12);
  EXPECT_EQ(sharing_of(apart), "");
  const auto together = merge_devices({device("GPU-1", 0), device("GPU-1", 1), device("GPU-2", 2)});
  EXPECT_EQ(together.size(), 2);
  EXPECT_EQ(peak_of(together, "fp16"), 2 * 989e12);
  EXPECT_EQ(sharing_of(together), "2 ranks share GPU 0 (NVIDIA H200): for tests, not for speed");
  const auto hosts =
      merge_devices({device("GPU-1", 0), device("GPU-2", 3, "b"), device("GPU-2", 3, "b")});
  EXPECT_EQ(sharing_of(hosts), "2 ranks share GPU 3 of b (NVIDIA H200): for tests, not for speed");
}

TEST(Utilization, IsNotKnownOfACpuInFp32OrOfAnotherGpu) {
  run_threads(2, [] { EXPECT_TRUE(used_devices(at::kCPU).empty()); });
  EXPECT_EQ(peak_of({}, "bf16"), std::nullopt);
  EXPECT_EQ(peak_of({{.uuid = "1", .name = "NVIDIA H200"}}, "fp32"), std::nullopt);
  EXPECT_EQ(peak_of({{.uuid = "1", .name = "Another"}}, "bf16"), std::nullopt);
}

}  // namespace
}  // namespace tessera::train
