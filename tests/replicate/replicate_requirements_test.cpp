// REQUIREMENTS.md 1.0, test by test.
#include <tessera/nn.h>
#include <tessera/replicate.h>
#include <tessera/state_dict.h>

#include "compose/on_device.h"
#include "replicate/models.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

class ReplicateOnBackends : public OnBackends {};
/// Tests that have no meaning on a GPU.
class ReplicateArgumentsOnBackends : public OnBackends {};
/// Tests that have none on the CPU.
class ReplicateDevices : public OnBackends {};

INSTANTIATE_TEST_SUITE_P(Every, ReplicateOnBackends, ::testing::ValuesIn(cpu_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ReplicateOnBackends, ::testing::ValuesIn(cuda_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(Every, ReplicateArgumentsOnBackends, ::testing::ValuesIn(cpu_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ReplicateDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm", "gloo"}, {2})),
                         backend_name);

Net net_on_device() { return on_device(Net()); }

/// The comparison draws inputs and targets on the CPU, and wants its outputs there.
Trainee fed_from_cpu(const Net& net) {
  auto result = fed(net);
  result.forward = [forward = result.forward](const at::Tensor& x) {
    return forward(x).to(x.device());
  };
  return result;
}

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
    auto net = net_on_device();
    auto copy = clone_module(net);
    replicate(copy);
    expect_same_state_dicts(net, copy);
  });
}

TEST_P(ReplicateOnBackends, R_000_2_StateDictOfSeparatelyReplicatedParts) {
  run(4, [] {
    auto net = net_on_device();
    auto copy = clone_module(net);
    replicate(copy->fc1);
    replicate(copy->fc2);
    replicate(copy->fc3);
    expect_same_state_dicts(net, copy);
  });
}

TEST_P(ReplicateOnBackends, R_000_3_TrainsLikeOneProcess) {
  run(2, [] {
    auto net = net_on_device();
    auto copy = clone_module(net);
    replicate(copy);
    expect_data_parallel_parity(fed_from_cpu(net), fed_from_cpu(copy));
  });
}

TEST_P(ReplicateOnBackends, R_000_5_IgnoresModules) {
  run(2, [] {
    torch::manual_seed(rank());
    auto net = net_on_device();
    const auto own_start = net->fc1->weight.detach().clone();
    replicate(net, {.ignored_modules = {net->fc1}});
    const auto x = torch::randn({5, 2}).to(run_device()) * (rank() + 1);
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
    auto net = net_on_device();
    auto copy = clone_module(net);
    replicate(copy->fc1);
    replicate(copy->fc2);
    replicate(copy->fc3);
    expect_data_parallel_parity(fed_from_cpu(net), fed_from_cpu(copy));
  });
}

TEST_P(ReplicateOnBackends, R_000_7_TrainsWithBucketViews) {
  run(2, [] {
    auto net = net_on_device();
    auto copy = clone_module(net);
    replicate(copy, {.bucket_cap_mb = 1, .gradient_as_bucket_view = true});
    expect_data_parallel_parity(fed_from_cpu(net), fed_from_cpu(copy), {.iterations = 4});
    // Views into one buffer: neighbours in memory.
    copy(torch::ones({1, 2}, run_device())).sum().backward();
    EXPECT_EQ(copy->fc1->weight.grad().storage().data(), copy->fc3->bias.grad().storage().data());
    EXPECT_EQ(replicate_state(copy)->engine()->stats().bucket_bytes, std::vector<int64_t>{72});
  });
}

TEST_P(ReplicateArgumentsOnBackends, R_000_8_CpuDeviceMeansNoDeviceIds) {
  run(2, [] {
    Net net;
    replicate(net, {.device_id = c10::Device("cpu")});
    EXPECT_EQ(replicate_state(net)->engine(), nullptr) << "no engine before the first forward";
    net(torch::randn({2, 2}));
    EXPECT_FALSE(replicate_state(net)->engine()->device_ids.has_value());
  });
}

TEST_P(ReplicateArgumentsOnBackends, R_000_9_RefusesAListAsDeviceId) {
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

TEST_P(ReplicateDevices, R_000_4_MovesArgumentsToTheDevice) {
  run(2, [] {
    auto net = on_device(MyNet());
    replicate(net, {.device_id = static_cast<int64_t>(run_device().index())});
    net(torch::randn({2, 2}), std::optional<at::Tensor>(torch::randn({2, 2}))).sum().backward();
    EXPECT_EQ(net->a->weight.grad().device(), run_device());
    const auto all = all_gather(net->a->weight.grad().flatten(), 0).view({2, -1});
    EXPECT_TRUE(at::equal(all[0], all[1]));
  });
}

TEST_P(ReplicateDevices, R_000_8_ReportsTheDevice) {
  run(2, [] {
    const int64_t index = run_device().index();
    for (const auto& id : {c10::IValue(run_device()), c10::IValue(index)}) {
      auto net = net_on_device();
      replicate(net, {.device_id = id});
      net(torch::randn({2, 2})).sum().backward();
      EXPECT_EQ(replicate_state(net)->engine()->device_ids, std::vector<int64_t>{index});
    }
  });
}

}  // namespace
}  // namespace tessera::testing
