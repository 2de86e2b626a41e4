// REQUIREMENTS.md 1.0, test by test.
#include <tessera/replicate.h>
#include <tessera/state_dict.h>

#include "replicate/models.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

class ReplicateOnBackends : public ::testing::TestWithParam<std::string> {
 protected:
  void run(int ranks, const RankBody& body) { run_processes(ranks, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, ReplicateOnBackends, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

std::vector<std::string> keys_of(const StateDict& dict) {
  std::vector<std::string> keys;
  for (const auto& [name, tensor] : dict) keys.push_back(name);
  return keys;
}

void expect_same_state_dicts(const Net& plain, const Net& replicated) {
  const auto expected = state_dict(plain);
  const auto actual = state_dict(replicated);
  const std::vector<std::string> names = {"fc1.weight", "fc1.bias",   "fc2.weight",
                                          "fc2.bias",   "fc3.weight", "fc3.bias"};
  EXPECT_EQ(keys_of(expected), names);
  EXPECT_EQ(keys_of(actual), names);
  for (const auto& name : names) EXPECT_TRUE(at::equal(expected[name], actual[name])) << name;
}

TEST_P(ReplicateOnBackends, R_000_1_StateDictOfAReplicatedModule) {
  run(4, [] {
    Net net;
    auto copy = clone_module(net);
    replicate(copy);
    expect_same_state_dicts(net, copy);
  });
}

TEST_P(ReplicateOnBackends, R_000_2_StateDictOfSeparatelyReplicatedParts) {
  run(4, [] {
    Net net;
    auto copy = clone_module(net);
    replicate(copy->fc1);
    replicate(copy->fc2);
    replicate(copy->fc3);
    expect_same_state_dicts(net, copy);
  });
}

TEST_P(ReplicateOnBackends, R_000_3_TrainsLikeOneProcess) {
  run(2, [] {
    Net net;
    auto copy = clone_module(net);
    expect_data_parallel_parity(net, replicate(copy));
  });
}

TEST_P(ReplicateOnBackends, R_000_5_IgnoresModules) {
  run(2, [] {
    torch::manual_seed(rank());
    Net net;
    const auto own_start = net->fc1->weight.detach().clone();
    replicate(net, {.ignored_modules = {net->fc1}});
    const auto x = torch::randn({5, 2}) * (rank() + 1);
    (net(x) * 10).sum().backward();
    EXPECT_TRUE(at::equal(own_start, net->fc1->weight)) << "ignored: not broadcast";
    const auto difference = [](const nn::Linear& layer) {
      const auto all = all_gather(layer->weight.grad().flatten(), 0).view({2, -1});
      return ((all[1] - all[0]).norm() / all[0].norm()).item<double>();
    };
    EXPECT_GT(difference(net->fc1), 1e-3);
    EXPECT_EQ(difference(net->fc2), 0);
    EXPECT_EQ(difference(net->fc3), 0);
  });
}

TEST_P(ReplicateOnBackends, R_000_6_TrainsSeparatelyReplicatedParts) {
  run(2, [] {
    Net net;
    auto copy = clone_module(net);
    replicate(copy->fc1);
    replicate(copy->fc2);
    replicate(copy->fc3);
    expect_data_parallel_parity(net, copy);
  });
}

TEST_P(ReplicateOnBackends, R_000_7_TrainsWithBucketViews) {
  run(2, [] {
    Net net;
    auto copy = clone_module(net);
    replicate(copy, {.bucket_cap_mb = 1, .gradient_as_bucket_view = true});
    expect_data_parallel_parity(net, copy, {.iterations = 4});
    // Views into one buffer: neighbours in memory.
    copy(torch::ones({1, 2})).sum().backward();
    EXPECT_EQ(copy->fc1->weight.grad().storage().data(), copy->fc3->bias.grad().storage().data());
    EXPECT_EQ(replicate_state(copy)->engine()->stats().bucket_bytes, std::vector<int64_t>{72});
  });
}

TEST_P(ReplicateOnBackends, R_000_8_CpuDeviceMeansNoDeviceIds) {
  run(2, [] {
    Net net;
    replicate(net, {.device_id = c10::Device("cpu")});
    EXPECT_EQ(replicate_state(net)->engine(), nullptr) << "no engine before the first forward";
    net(torch::randn({2, 2}));
    EXPECT_FALSE(replicate_state(net)->engine()->device_ids.has_value());
  });
}

TEST_P(ReplicateOnBackends, R_000_9_RefusesAListAsDeviceId) {
  run(2, [] {
    Net net;
    try {
      replicate(net, {.device_id = c10::List<c10::Device>({c10::Device("cpu")})});
      FAIL() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("Expected device_id to be int or torch.device"));
    }
    EXPECT_EQ(replicate_state(net), nullptr);
  });
}

// One rank per device; with one device a world of one still moves inputs and reports ids.
int cuda_ranks() { return torch::cuda::device_count() >= 2 ? 2 : 1; }
c10::Device own_device() { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(rank())}; }

TEST(ReplicateOnCuda, R_000_4_MovesArgumentsToTheDevice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  run_processes(cuda_ranks(), [] {
    MyNet net;
    net->to(own_device());
    replicate(net, {.device_id = rank()});
    net(torch::randn({2, 2}), std::optional<at::Tensor>(torch::randn({2, 2}))).sum().backward();
    EXPECT_TRUE(net->a->weight.grad().is_cuda());
  });
}

TEST(ReplicateOnCuda, R_000_8_ReportsTheDevice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  run_processes(cuda_ranks(), [] {
    for (const auto& id : {c10::IValue(own_device()), c10::IValue(rank())}) {
      Net net;
      net->to(own_device());
      replicate(net, {.device_id = id});
      net(torch::randn({2, 2})).sum().backward();
      EXPECT_EQ(replicate_state(net)->engine()->device_ids, std::vector<int64_t>{rank()});
    }
  });
}

}  // namespace
}  // namespace tessera::testing
