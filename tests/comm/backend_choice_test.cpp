#include "comm/backends.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

std::string error_of_backends(const std::string& text) {
  try {
    parse_backends(text, "init");
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

TEST(BackendNames, OneNameServesAllThatItCan) {
  EXPECT_EQ(parse_backends("gloo", "init").cpu, "gloo");
  EXPECT_EQ(parse_backends("gloo", "init").cuda, "gloo");
  EXPECT_EQ(parse_backends("nccl", "init").cpu, "");
  EXPECT_EQ(parse_backends("nccl", "init").cuda, "nccl");
}

TEST(BackendNames, OneNamePerDevice) {
  const auto both = parse_backends("cpu:gloo,cuda:nccl", "init");
  EXPECT_EQ(both.cpu, "gloo");
  EXPECT_EQ(both.cuda, "nccl");
  const auto turned = parse_backends("cuda:shm,cpu:gloo", "init");
  EXPECT_EQ(turned.cpu, "gloo");
  EXPECT_EQ(turned.cuda, "shm");
  EXPECT_EQ(parse_backends("cuda:gloo", "init").cpu, "");
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
}

TEST(BackendChoice, WithoutGpusOneBackendServesAll) {
  const auto near = choose_backends(places({{"a", ""}, {"a", ""}}));
  EXPECT_EQ(near.names.cpu, "shm");
  EXPECT_EQ(near.names.cuda, "shm");
  const auto far = choose_backends(places({{"a", ""}, {"b", ""}}));
  EXPECT_EQ(far.names.cpu, "gloo");
  EXPECT_EQ(far.names.cuda, "gloo");
}

TEST(BackendChoice, NcclWhereEveryRankHasItsOwnGpu) {
  const auto near = choose_backends(places({{"a", "GPU-1"}, {"a", "GPU-2"}}));
  EXPECT_EQ(near.names.cpu, "shm");
  EXPECT_EQ(near.names.cuda, "nccl");
  EXPECT_THAT(near.reason, HasSubstr("every rank has a GPU of its own"));
  const auto far = choose_backends(places({{"a", "GPU-1"}, {"b", "GPU-2"}}));
  EXPECT_EQ(far.names.cpu, "gloo");
  EXPECT_EQ(far.names.cuda, "nccl");
}

TEST(BackendChoice, RanksThatShareAGpuUseTheCpusBackend) {
  const auto near = choose_backends(places({{"a", "GPU-1"}, {"a", "GPU-2"}, {"a", "GPU-1"}}));
  EXPECT_EQ(near.names.cuda, "shm");
  EXPECT_EQ(near.reason, "shm for CUDA tensors: ranks 0 and 2 share GPU-1");
  const auto far = choose_backends(places({{"a", "GPU-1"}, {"a", "GPU-1"}, {"b", "GPU-3"}}));
  EXPECT_EQ(far.names.cuda, "gloo");
}

TEST(BackendChoice, NoNcclWhereARankHasNoGpu) {
  const auto choice = choose_backends(places({{"a", "GPU-1"}, {"a", ""}}));
  EXPECT_EQ(choice.names.cuda, "shm");
  EXPECT_THAT(choice.reason, HasSubstr("rank 1 has no GPU"));
}

TEST(BackendChoice, TooManyRanksForSharedMemory) {
  std::vector<std::pair<std::string, std::string>> where(65, {"a", ""});
  EXPECT_EQ(choose_backends(places(where)).names.cpu, "gloo");
}

TEST(BackendChoice, FindsTheFirstTwoOfADevice) {
  const auto shared = find_shared_device({"", "GPU-2", "", "GPU-1", "GPU-2", "GPU-1"});
  EXPECT_EQ(shared.first, 1);
  EXPECT_EQ(shared.second, 4);
  EXPECT_EQ(find_shared_device({"GPU-1", ""}).first, -1);
}

}  // namespace
}  // namespace tessera::comm
