// Every backend through one body of tests, with ranks as threads and as processes, on the CPU and
// on GPUs.
#include "comm/collective_bodies.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <ostream>

namespace tessera::collective_bodies {

void PrintTo(const Body& body, std::ostream* out) { *out << body.name; }  // NOLINT: gtest's name

namespace {

constexpr std::chrono::seconds kTimeout{20};

std::vector<Body> all_bodies() {
  std::vector<Body> all;
  for (const auto* list : {&reduce_bodies(), &move_bodies(), &border_bodies(), &point_bodies(),
                           &result_bodies(), &layout_bodies()}) {
    all.insert(all.end(), list->begin(), list->end());
  }
  return all;
}

std::vector<Body> fake_bodies() {
  auto bodies = all_bodies();
  std::erase_if(bodies, [](const Body& body) { return !body.has_meaning_on_fake; });
  return bodies;
}

constexpr int kRanks[] = {1, 2, 3, 4};

using Case = std::tuple<Body, std::string>;  // what, backend

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const auto& [body, backend] = info.param;
  return std::string(body.name) + "_" + backend;
}

class CollectivesOnThreads : public ::testing::TestWithParam<Case> {};

TEST_P(CollectivesOnThreads, Hold) {
  const auto& [body, backend] = GetParam();
  for (const int ranks : kRanks) {
    const Setting setting{.backend = backend, .ranks = ranks};
    testing::run_threads(ranks, [&, run = body.run] { run(setting); },
                         {.backend = backend, .timeout = kTimeout});
  }
}

INSTANTIATE_TEST_SUITE_P(Every, CollectivesOnThreads,
                         ::testing::Combine(::testing::ValuesIn(all_bodies()),
                                            ::testing::Values("shm", "gloo")),
                         name_of);

/// Starting processes takes longer than most bodies: all of them in one run.
class CollectivesOnProcesses : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(CollectivesOnProcesses, Hold) {
  const auto& [backend, ranks] = GetParam();
  const Setting setting{.backend = backend, .ranks = ranks};
  const auto run_all = [&] {
    for (const auto& body : all_bodies()) {
      SCOPED_TRACE(body.name);
      body.run(setting);
    }
  };
  testing::run_processes(ranks, run_all, {.backend = backend, .timeout = kTimeout});
}

INSTANTIATE_TEST_SUITE_P(Every, CollectivesOnProcesses,
                         ::testing::Combine(::testing::Values("shm", "gloo"),
                                            ::testing::ValuesIn(kRanks)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

/// What c10d's NCCL does otherwise, by body.
const std::map<std::string, std::string>& not_on_nccl() {
  const std::string dense = "takes contiguous tensors alone";
  const std::string errors = "its errors are c10d's own";
  const std::string order =
      "pairs messages in the order of calls, and a send may wait for its recv";
  const std::string works = "its works leave out isSuccess, getDuration and the like";
  static const std::map<std::string, std::string> kReasons = {
      {"RefusesOperationsWithoutMeaning", errors},
      {"RefusesToWriteWhereElementsShareMemory", errors},
      {"RefusesWhatIsNoDenseTensor", errors},
      {"AccumulatesHalfTypesInFloat", "sums halves as halves, pair by pair"},
      {"ANanOnAnyRankWins", "its minimum and maximum pass over NaN"},
      {"ReducesViewsInPlace", dense},
      {"MovesViews", dense},
      {"ReadsTensorsWhoseElementsShareMemory", dense},
      {"LeavesAutogradAlone", dense},
      {"AppliesPendingConjugation", dense},
      {"MessagesOfAnyLayout", dense},
      {"SendsEveryDtype", order},
      {"KeepsTheOrderWithinATag", order},
      {"WaitsForMessagesInAnyOrder", order},
      {"CrossingLargeMessagesDoNotBlock", order},
      {"PostedReceivesNeedNoAttention", order},
      {"MessagesAndCollectivesDoNotMix", order},
      {"MessagesEndThroughFuturesAndPolling", order},
      {"MessagesAtBorders", order},
      {"CallbacksMaySendAndReceive", order},
      {"TakesTagsInAnotherOrderThanSent", "has no tags"},
      {"ReceivesFromAnySource", "has no recvAnysource"},
      {"CompletesByWaitFutureAndPolling", works},
      {"GathersSeveralListsAtOnce", "has no allgather_coalesced"},
      {"CoalescesByScope", "coalesces calls of one kind alone"},
      {"CoalescedMessagesEndTogether", "coalesces calls of one kind alone"},
  };
  return kReasons;
}

std::vector<Body> cuda_bodies() {
  auto bodies = all_bodies();
  std::erase_if(
      bodies, [](const Body& body) { return std::string(body.name) == "RunsAloneInAWorldOfOne"; });
  return bodies;
}

using CudaCase = std::tuple<testing::DeviceCase, Body>;

std::string name_of_cuda_case(const ::testing::TestParamInfo<CudaCase>& info) {
  const auto& [device_case, body] = info.param;
  return std::string(body.name) + "_" + device_case.name();
}

class CollectivesOnCuda : public ::testing::TestWithParam<CudaCase> {
 protected:
  static void SetUpTestSuite() {
    if (!supports("nccl", at::kCUDA, at::kFloat)) return;
    std::cout << "nccl is tested without";
    for (const auto dtype : kDtypes) {
      if (!supports("nccl", at::kCUDA, dtype)) std::cout << " " << dtype;
    }
    std::cout << ", bitwise operations, and products of complex numbers" << std::endl;
  }
};

TEST_P(CollectivesOnCuda, Hold) {
  const auto& [device_case, body] = GetParam();
  const auto reason = not_on_nccl().find(body.name);
  if (device_case.backend == "nccl" && reason != not_on_nccl().end())
    GTEST_SKIP() << "nccl " << reason->second;
  const auto run = [&, run = body.run] {
    run({.backend = device_case.backend,
         .ranks = device_case.ranks,
         .device = testing::run_device()});
  };
  testing::run_on(device_case, run, {.timeout = kTimeout});
}

INSTANTIATE_TEST_SUITE_P(Every, CollectivesOnCuda,
                         ::testing::Combine(::testing::ValuesIn(testing::cuda_cases({"nccl", "shm",
                                                                                     "gloo"})),
                                            ::testing::ValuesIn(cuda_bodies())),
                         name_of_cuda_case);

class CollectivesPretended : public ::testing::TestWithParam<Body> {};

TEST_P(CollectivesPretended, Hold) {
  for (const int ranks : kRanks) {
    for (const int rank : {0, ranks - 1}) {
      const auto world = testing::fake_world(rank, ranks);
      GetParam().run({.backend = "fake", .ranks = ranks});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, CollectivesPretended, ::testing::ValuesIn(fake_bodies()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::collective_bodies
