#include "comm/backends.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

std::string error_of_backends(const BackendOption& option) {
  try {
    read_backends(option, "init");
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// Ranks 0, 1, … with a host and a device each.
std::vector<RankPlace> places(const std::vector<std::pair<std::string, std::string>>& where) {
  std::vector<RankPlace> places;
  for (const auto& [host, device] : where)
    places.push_back({.rank = static_cast<int>(places.size()), .host = host, .device = device});
  return places;
}

DeviceBackends read(const BackendOption& option) { return read_backends(option, "init").value(); }

TEST(BackendNames, OneNameServesAllThatItCan) {
  const DeviceBackends gloo{.cpu = Backend::Gloo, .cuda = Backend::Gloo};
  const DeviceBackends nccl{.cuda = Backend::Nccl};
  EXPECT_EQ(read("gloo"), gloo);
  EXPECT_EQ(read(Backend::Gloo), gloo);
  EXPECT_EQ(read("nccl"), nccl);
  EXPECT_EQ(read(Backend::Nccl), nccl);
}

TEST(BackendNames, OneNamePerDevice) {
  for (const DeviceBackends both :
       {DeviceBackends{.cpu = Backend::Gloo, .cuda = Backend::Nccl},
        DeviceBackends{.cpu = Backend::Shm, .cuda = Backend::Gloo},
        DeviceBackends{.cpu = Backend::Gloo}, DeviceBackends{.cuda = Backend::Gloo}})
    EXPECT_EQ(read(both), both);
  EXPECT_EQ(read("cpu:gloo,cuda:nccl"),
            (DeviceBackends{.cpu = Backend::Gloo, .cuda = Backend::Nccl}));
  EXPECT_EQ(read("cuda:shm,cpu:gloo"),
            (DeviceBackends{.cpu = Backend::Gloo, .cuda = Backend::Shm}));
  EXPECT_EQ(read("cuda:gloo"), (DeviceBackends{.cuda = Backend::Gloo}));
}

TEST(BackendNames, AutoIsLeftToTheRanks) {
  EXPECT_EQ(read_backends("auto", "init"), std::nullopt);
  EXPECT_EQ(read_backends(std::string("auto"), "init"), std::nullopt);
  EXPECT_EQ(read_backends(Backend::Auto, "init"), std::nullopt);
}

TEST(BackendNames, TellsWhatIsWrong) {
  EXPECT_THAT(error_of_backends("mpi"), HasSubstr("init: expected one of the backends"));
  EXPECT_THAT(error_of_backends("cpu:mpi"), HasSubstr("got \"mpi\""));
  EXPECT_THAT(error_of_backends("tpu:shm"), HasSubstr("got \"tpu\"; write for example"));
  EXPECT_THAT(error_of_backends("shm,gloo"), HasSubstr("expected \"device:backend\""));
  EXPECT_THAT(error_of_backends("cpu:shm,cpu:gloo"),
              HasSubstr("expected one backend for \"cpu\", got two"));
  EXPECT_THAT(error_of_backends("cpu:nccl"), HasSubstr("for \"cpu\", got nccl; use shm"));
  EXPECT_THAT(error_of_backends("cpu:shm,cuda:fake"), HasSubstr("got a mixture"));
  EXPECT_THAT(error_of_backends("cpu:auto"), HasSubstr("got \"auto\", which chooses for both"));
}

TEST(BackendNames, TellsWhatIsWrongOfEnums) {
  EXPECT_THAT(error_of_backends(DeviceBackends{.cpu = Backend::Nccl}),
              HasSubstr("init: backend \"cpu:nccl\": expected a backend that takes CPU tensors"));
  EXPECT_THAT(error_of_backends(DeviceBackends{.cpu = Backend::Shm, .cuda = Backend::Fake}),
              HasSubstr("got a mixture"));
  EXPECT_THAT(error_of_backends(DeviceBackends{.cuda = Backend::Auto}),
              HasSubstr("got \"auto\", which chooses for both"));
  EXPECT_THROW(BackendOption(DeviceBackends{}), c10::ValueError);
}

TEST(BackendChoice, WithoutGpusOneBackendServesAll) {
  const auto near = choose_backends(places({{"a", ""}, {"a", ""}}));
  EXPECT_EQ(near.backends.cpu, Backend::Shm);
  EXPECT_EQ(near.backends.cuda, Backend::Shm);
  const auto far = choose_backends(places({{"a", ""}, {"b", ""}}));
  EXPECT_EQ(far.backends.cpu, Backend::Gloo);
  EXPECT_EQ(far.backends.cuda, Backend::Gloo);
}

TEST(BackendChoice, NcclWhereEveryRankHasItsOwnGpu) {
  const auto near = choose_backends(places({{"a", "GPU-1"}, {"a", "GPU-2"}}));
  EXPECT_EQ(near.backends.cpu, Backend::Shm);
  EXPECT_EQ(near.backends.cuda, Backend::Nccl);
  EXPECT_THAT(near.reason, HasSubstr("every rank has a GPU of its own"));
  const auto far = choose_backends(places({{"a", "GPU-1"}, {"b", "GPU-2"}}));
  EXPECT_EQ(far.backends.cpu, Backend::Gloo);
  EXPECT_EQ(far.backends.cuda, Backend::Nccl);
}

TEST(BackendChoice, RanksThatShareAGpuUseTheCpusBackend) {
  const auto near = choose_backends(places({{"a", "GPU-1"}, {"a", "GPU-2"}, {"a", "GPU-1"}}));
  EXPECT_EQ(near.backends.cuda, Backend::Shm);
  EXPECT_EQ(near.reason, "shm for CUDA tensors: ranks 0 and 2 share GPU-1");
  const auto far = choose_backends(places({{"a", "GPU-1"}, {"a", "GPU-1"}, {"b", "GPU-3"}}));
  EXPECT_EQ(far.backends.cuda, Backend::Gloo);
}

TEST(BackendChoice, NoNcclWhereARankHasNoGpu) {
  const auto choice = choose_backends(places({{"a", "GPU-1"}, {"a", ""}}));
  EXPECT_EQ(choice.backends.cuda, Backend::Shm);
  EXPECT_THAT(choice.reason, HasSubstr("rank 1 has no GPU"));
}

TEST(BackendChoice, TooManyRanksForSharedMemory) {
  std::vector<std::pair<std::string, std::string>> where(65, {"a", ""});
  EXPECT_EQ(choose_backends(places(where)).backends.cpu, Backend::Gloo);
}

TEST(BackendChoice, FindsTheFirstTwoOfADevice) {
  const auto shared = find_shared_device({"", "GPU-2", "", "GPU-1", "GPU-2", "GPU-1"});
  EXPECT_EQ(shared.first, 1);
  EXPECT_EQ(shared.second, 4);
  EXPECT_EQ(find_shared_device({"GPU-1", ""}).first, -1);
}

}  // namespace
}  // namespace tessera::comm
