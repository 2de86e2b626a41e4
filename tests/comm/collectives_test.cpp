// Every backend through one body of tests, with ranks as threads and as processes.
#include "comm/collective_bodies.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

#include <ostream>

namespace tessera::collective_bodies {

void PrintTo(const Body& body, std::ostream* out) { *out << body.name; }  // NOLINT: gtest's name

namespace {

using testing::RankOptions;

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

using Case = std::tuple<Body, std::string, int>;  // what, backend, ranks

template <class T>
std::string name_of(const ::testing::TestParamInfo<T>& info) {
  const auto& [body, backend, ranks] = info.param;
  return std::string(body.name) + "_" + backend + "_" + std::to_string(ranks);
}

class CollectivesOnThreads : public ::testing::TestWithParam<Case> {};

TEST_P(CollectivesOnThreads, Hold) {
  const auto& [body, backend, ranks] = GetParam();
  const Setting setting{.backend = backend, .ranks = ranks};
  testing::run_threads(ranks, [&, run = body.run] { run(setting); }, {.backend = backend});
}

INSTANTIATE_TEST_SUITE_P(Shm, CollectivesOnThreads,
                         ::testing::Combine(::testing::ValuesIn(all_bodies()),
                                            ::testing::Values("shm"),
                                            ::testing::Values(1, 2, 3, 4)),
                         name_of<Case>);
INSTANTIATE_TEST_SUITE_P(Gloo, CollectivesOnThreads,
                         ::testing::Combine(::testing::ValuesIn(all_bodies()),
                                            ::testing::Values("gloo"),
                                            ::testing::Values(1, 2, 3, 4)),
                         name_of<Case>);

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
  testing::run_processes(ranks, run_all, {.backend = backend});
}

INSTANTIATE_TEST_SUITE_P(Dist, CollectivesOnProcesses,
                         ::testing::Combine(::testing::Values("shm", "gloo"),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

class CollectivesPretended : public ::testing::TestWithParam<Case> {};

TEST_P(CollectivesPretended, HaveTheRightShapes) {
  const auto& [body, backend, ranks] = GetParam();
  for (const int rank : {0, ranks - 1}) {
    const auto world = testing::fake_world(rank, ranks);
    body.run({.backend = backend, .ranks = ranks});
  }
}

INSTANTIATE_TEST_SUITE_P(Fake, CollectivesPretended,
                         ::testing::Combine(::testing::ValuesIn(fake_bodies()),
                                            ::testing::Values("fake"), ::testing::Values(1, 4)),
                         name_of<Case>);

}  // namespace
}  // namespace tessera::collective_bodies
