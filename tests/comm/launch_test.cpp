#include "comm/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Launch launch_of(const Variables& variables, const InitOptions& options = {}) {
  return find_launch(options, Environment(variables));
}

/// The text of the ValueError that `variables` and `options` give; empty if there is none.
std::string launch_error(const Variables& variables, const InitOptions& options = {}) {
  try {
    launch_of(variables, options);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kTesseraRun = {{"TESSERA_RANK", "0"},
                               {"TESSERA_WORLD_SIZE", "4"},
                               {"TESSERA_LOCAL_RANK", "0"},
                               {"TESSERA_LOCAL_WORLD_SIZE", "4"},
                               {"TESSERA_STORE", "unix://@00042"},
                               {"TESSERA_STORE_LISTEN_FD", "7"},
                               {"TESSERA_RESTART_COUNT", "2"}};
const Variables kTorchrun = {{"RANK", "3"},           {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29400"}};
const Variables kSlurm = {{"SLURM_JOB_ID", "1234"}, {"SLURM_STEP_ID", "0"},
                          {"SLURM_PROCID", "5"},    {"SLURM_NTASKS", "6"},
                          {"SLURM_LOCALID", "1"},   {"SLURM_NODELIST", "node[07-09]"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}};
const Variables kMpich = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

TEST(Launch, IsAWorldOfOneWithoutLauncher) {
  const Launch launch = launch_of({});
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_TRUE(launch.is_alone);
  EXPECT_EQ(launch.init_method, "");
  EXPECT_EQ(launch.launcher, "none");
}

TEST(Launch, ReadsTesseraRun) {
  const Launch launch = launch_of(kTesseraRun);
  EXPECT_EQ(launch.launcher, "tessera run");
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.local_world_size, 4);
  EXPECT_EQ(launch.init_method, "unix://@00042");
  EXPECT_EQ(launch.listen_fd, 7);
  EXPECT_EQ(launch.store_prefix, "attempt_2");
  EXPECT_FALSE(launch.store_is_served_by_agent);
  EXPECT_EQ(launch_of(with(kTesseraRun, {{"TESSERA_RANK", "1"}})).listen_fd, std::nullopt);
}

TEST(Launch, SignsStoresThatOthersCanReach) {
  const Variables secret = {{"TESSERA_JOB_SECRET", "sixteen letters!"}};
  EXPECT_EQ(launch_of(with(kTorchrun, secret)).job_secret, "sixteen letters!");
  EXPECT_EQ(launch_of(kTorchrun).job_secret, "");
  EXPECT_EQ(launch_of(with(kTesseraRun, secret)).job_secret, "") << "a local socket is private";
}

TEST(Launch, ReadsTorchrun) {
  const Launch launch = launch_of(kTorchrun);
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 2);
  EXPECT_EQ(launch.init_method, "tcp://head:29400");
  EXPECT_FALSE(launch.store_is_served_by_agent);
  EXPECT_EQ(launch.store_prefix, "");
}

TEST(Launch, LeavesServingToTorchrunsAgent) {
  const Launch launch = launch_of(with(
      kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  EXPECT_TRUE(launch.store_is_served_by_agent);
  EXPECT_EQ(launch.store_prefix, "/worker/attempt_3");
  EXPECT_FALSE(launch_of(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))
                   .store_is_served_by_agent);
}

TEST(Launch, ReadsSlurm) {
  const Launch launch = launch_of(kSlurm);
  EXPECT_EQ(launch.launcher, "Slurm");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 6);
  EXPECT_EQ(launch.local_rank, 1);
  const StoreAddress address = parse_store_address(launch.init_method);
  EXPECT_EQ(address.host, "node07");
  EXPECT_GE(address.port, 20000);
  EXPECT_LT(address.port, 30000);
  EXPECT_NE(launch.init_method, launch_of(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).init_method);
  EXPECT_EQ(launch_of(with(kSlurm, {{"MASTER_ADDR", "ib0"}, {"MASTER_PORT", "5"}})).init_method,
            "tcp://ib0:5");
  EXPECT_EQ(launch_of(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "7"}})).world_size, 7);
  EXPECT_EQ(parse_store_address(launch_of(with(kSlurm, {{"SLURM_NNODES", "1"}})).init_method).host,
            "127.0.0.1");
}

TEST(Launch, IgnoresSlurmOutsideAStep) {
  Variables batch = kSlurm;
  batch.erase("SLURM_STEP_ID");
  EXPECT_TRUE(launch_of(batch).is_alone);
  EXPECT_TRUE(launch_of(with(kSlurm, {{"SLURM_STEP_ID", "4294967291"}})).is_alone);
}

TEST(Launch, FindsTheFirstHostOfASlurmList) {
  EXPECT_EQ(first_slurm_host("node[01-04,07],x"), "node01");
  EXPECT_EQ(first_slurm_host("x,node[01-04]"), "x");
  EXPECT_EQ(first_slurm_host("gpu-a[3,5]-[1-2]-ib,y"), "gpu-a3-1-ib");
  EXPECT_EQ(first_slurm_host("login-1"), "login-1");
  EXPECT_EQ(first_slurm_host(""), "");
}

TEST(Launch, ReadsOpenMpi) {
  const Launch launch = launch_of(kOpenMpi);
  EXPECT_EQ(launch.launcher, "Open MPI");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.world_size, 3);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 3);
  EXPECT_EQ(launch.init_method, "tcp://127.0.0.1:29500");
  EXPECT_NE(launch_of(with(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-1"}})).init_method,
            launch.init_method);
  EXPECT_EQ(launch_of(with(kOpenMpi, {{"MASTER_ADDR", "a"}})).init_method, "tcp://a:29500");
}

TEST(Launch, ReadsMpich) {
  const Launch launch = launch_of(kMpich);
  EXPECT_EQ(launch.launcher, "MPICH");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.world_size, 2);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 2);
  EXPECT_EQ(launch.init_method, "tcp://127.0.0.1:29500");
}

TEST(Launch, AsksForTheAddressWhenMpiSpansHosts) {
  const auto text = launch_error(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  EXPECT_THAT(text, HasSubstr("launcher: Open MPI"));
  EXPECT_THAT(text, HasSubstr("set MASTER_ADDR to the host of rank 0"));
  EXPECT_THAT(launch_error({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}), HasSubstr("set MASTER_ADDR"));
}

TEST(Launch, AsksLaunchersInOrder) {
  Variables all = with(with(kTesseraRun, kTorchrun), with(kSlurm, kMpich));
  EXPECT_EQ(launch_of(all).launcher, "tessera run");
  all.erase("TESSERA_RANK"), all.erase("TESSERA_WORLD_SIZE");
  EXPECT_EQ(launch_of(all).launcher, "torchrun");
  all.erase("RANK"), all.erase("WORLD_SIZE"), all.erase("PMI_RANK");
  EXPECT_EQ(launch_of(all).launcher, "Slurm");
}

TEST(Launch, BelievesMpirunInsideSlurm) {
  EXPECT_EQ(launch_of(with(kSlurm, kOpenMpi)).launcher, "Open MPI");
  EXPECT_EQ(launch_of(with(kSlurm, kMpich)).launcher, "MPICH");
  EXPECT_EQ(launch_of(with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}})).launcher, "Slurm");
}

TEST(Launch, PrefersExplicitOptions) {
  const Launch all =
      launch_of(kTorchrun, {.rank = 0, .world_size = 2, .init_method = "tcp://other:1"});
  EXPECT_EQ(all.launcher, "options");
  EXPECT_EQ(all.rank, 0);
  EXPECT_EQ(all.world_size, 2);
  EXPECT_EQ(all.init_method, "tcp://other:1");
  EXPECT_EQ(all.local_rank, std::nullopt);

  const Launch place = launch_of(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
                                 {.init_method = "file:///tmp/store"});
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.init_method, "file:///tmp/store");
  EXPECT_FALSE(place.store_is_served_by_agent);

  const Launch rank = launch_of(kTorchrun, {.rank = 4});
  EXPECT_EQ(rank.rank, 4);
  EXPECT_EQ(rank.world_size, 8);
  EXPECT_EQ(rank.local_rank, std::nullopt) << "the launcher's local rank is rank 3's";

  EXPECT_EQ(launch_of(kTorchrun, {.local_rank = 5}).local_rank, 5);
}

TEST(Launch, MeetsAtMasterAddrWithExplicitRanks) {
  const Launch launch =
      launch_of({{"MASTER_ADDR", "head"}, {"MASTER_PORT", "77"}}, {.rank = 1, .world_size = 2});
  EXPECT_EQ(launch.init_method, "tcp://head:77");
  EXPECT_EQ(launch_of(kTorchrun, {.init_method = "env://"}).init_method, "tcp://head:29400");
}

TEST(Launch, NeedsNoPlaceForFakeRanks) {
  const Launch launch = launch_of({}, {.backend = "fake", .rank = 17, .world_size = 1024});
  EXPECT_TRUE(launch.is_alone);
  EXPECT_EQ(launch.rank, 17);
  EXPECT_EQ(launch.world_size, 1024);
  EXPECT_TRUE(launch_of(kTorchrun, {.backend = "fake"}).is_alone);
}

TEST(Launch, TakesAStoreWithItsRanks) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const Launch launch = launch_of(kTorchrun, {.rank = 1, .world_size = 2, .store = store});
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.init_method, "");
  EXPECT_FALSE(launch.is_alone);
  EXPECT_THAT(launch_error(kTorchrun, {.rank = 1, .store = store}),
              HasSubstr("InitOptions::world_size is not set"));
  EXPECT_THAT(launch_error({}, {.world_size = 1, .store = store}),
              HasSubstr("InitOptions::rank is not set"));
  EXPECT_THAT(
      launch_error({}, {.rank = 0, .world_size = 1, .store = store, .init_method = "tcp://a:1"}),
      HasSubstr("either a store or an init_method"));
}

TEST(LaunchError, NamesTheMissingHalf) {
  EXPECT_THAT(launch_error({{"RANK", "0"}}),
              HasSubstr("got RANK but no WORLD_SIZE (launcher: torchrun)"));
  EXPECT_THAT(launch_error({{"WORLD_SIZE", "2"}}), HasSubstr("got WORLD_SIZE but no RANK"));
  EXPECT_THAT(launch_error({{"TESSERA_RANK", "0"}}),
              HasSubstr("got TESSERA_RANK but no TESSERA_WORLD_SIZE"));
  EXPECT_THAT(launch_error({{"OMPI_COMM_WORLD_RANK", "0"}}), HasSubstr("no OMPI_COMM_WORLD_SIZE"));
  EXPECT_THAT(launch_error({}, {.rank = 0}),
              HasSubstr("got InitOptions::rank but no InitOptions::world_size"));
  EXPECT_THAT(launch_error({}, {.init_method = "tcp://a:1"}),
              HasSubstr("needs rank and world_size"));
  EXPECT_EQ(
      launch_of({{"RANK", "0"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}, {.world_size = 2})
          .world_size,
      2);
}

TEST(LaunchError, NamesTheVariableThatIsNoNumber) {
  EXPECT_THAT(
      launch_error(with(kTorchrun, {{"RANK", "one"}})),
      HasSubstr("init: environment variable RANK: expected a number from 0 to 131072, got 'one'"));
  EXPECT_THAT(launch_error(with(kTorchrun, {{"MASTER_PORT", "29400x"}})), HasSubstr("MASTER_PORT"));
}

TEST(LaunchError, NamesTheVariableThatIsOutOfRange) {
  const std::pair<Variables, std::vector<const char*>> launchers[] = {
      {kTesseraRun,
       {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_WORLD_SIZE"}},
      {kTorchrun, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}},
      {kSlurm, {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}},
      {kOpenMpi,
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"}},
      {kMpich, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}}};
  for (const auto& [variables, names] : launchers) {
    for (const std::string name : names) {
      for (const std::string value : {"999999999", "99999999999999999999", "-1"}) {
        EXPECT_THAT(launch_error(with(variables, {{name, value}})),
                    HasSubstr(name + ": expected a number from 0 to 131072, got '" + value + "'"));
      }
    }
  }
  EXPECT_THAT(launch_error(with(kTesseraRun, {{"TESSERA_STORE_LISTEN_FD", "-3"}})),
              HasSubstr("TESSERA_STORE_LISTEN_FD: expected a number from 0 to 2147483647"));
  EXPECT_THAT(launch_error(with(kTorchrun, {{"MASTER_PORT", "99999999"}})),
              HasSubstr("a port from 1 to 65535"));
}

TEST(LaunchError, RefusesWorldsThatNoClusterHas) {
  EXPECT_THAT(launch_error({}, {.backend = "fake", .rank = 0, .world_size = 999'999'999}),
              HasSubstr("expected a world size of at most 131072, got 999999999"));
  EXPECT_EQ(launch_error({}, {.backend = "fake", .rank = 0, .world_size = 131'072}), "");
}

TEST(LaunchError, RefusesMoreRanksOnTheHostThanInTheWorld) {
  for (const char* size : {"0", "9"}) {
    EXPECT_THAT(launch_error(with(kTorchrun, {{"LOCAL_WORLD_SIZE", size}})),
                HasSubstr(std::string("expected from 1 to 8 ranks on this host, the size of the "
                                      "world, got ") +
                          size + " (launcher: torchrun)"));
  }
}

TEST(LaunchError, RefusesRanksOutsideTheWorld) {
  EXPECT_THAT(launch_error(with(kTorchrun, {{"RANK", "8"}})),
              HasSubstr("expected a rank from 0 to 7 in a world of size 8, got 8"));
  EXPECT_THAT(launch_error({}, {.rank = 2, .world_size = 2, .init_method = "tcp://a:1"}),
              HasSubstr("expected a rank from 0 to 1 in a world of size 2, got 2"));
  EXPECT_THAT(launch_error({}, {.rank = -1, .world_size = 2, .init_method = "tcp://a:1"}),
              HasSubstr("in a world of size 2, got -1"));
  EXPECT_THAT(launch_error({}, {.rank = 0, .world_size = 0, .init_method = "tcp://a:1"}),
              HasSubstr("at least 1, got 0"));
  EXPECT_THAT(
      launch_error({}, {.rank = 0, .world_size = 2, .init_method = "tcp://a:1", .local_rank = 2}),
      HasSubstr("local rank 2 is outside"));
}

TEST(LaunchError, AsksWhereTheRanksMeet) {
  EXPECT_THAT(launch_error({}, {.rank = 0, .world_size = 2}),
              HasSubstr("rank 0 of 2 does not know where the ranks meet"));
  EXPECT_THAT(launch_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("set MASTER_ADDR"));
  EXPECT_EQ(launch_error({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "");
}

TEST(LaunchError, RefusesBadInitMethods) {
  auto of = [](const char* text) {
    return launch_error({}, {.rank = 0, .world_size = 2, .init_method = text});
  };
  EXPECT_THAT(of("udp://a:1"), HasSubstr("unknown scheme in init_method \"udp://a:1\""));
  EXPECT_THAT(of("a:1"), HasSubstr("unknown scheme"));
  EXPECT_THAT(of("tcp://a"), HasSubstr("expected init_method \"tcp://host:port\""));
  EXPECT_THAT(of("tcp://:1"), HasSubstr("expected init_method \"tcp://host:port\""));
  EXPECT_THAT(of("tcp://a:0"), HasSubstr("a port from 1 to 65535"));
  EXPECT_THAT(of("tcp://a:70000"), HasSubstr("a port from 1 to 65535"));
  EXPECT_THAT(of("file://store"), HasSubstr("absolute path"));
  EXPECT_THAT(of("file://"), HasSubstr("absolute path"));
  EXPECT_EQ(parse_store_address("tcp://[::1]:5").host, "::1");
  EXPECT_EQ(tcp_address("::1", 5), "tcp://[::1]:5");
  EXPECT_THAT(of("unix:///tmp/socket"), HasSubstr("or \"unix://@name\""));
  EXPECT_THAT(of("unix://@"), HasSubstr("a name of 1 to 100 characters"));
  EXPECT_EQ(parse_store_address("unix://@a").name, "a");
}

}  // namespace
}  // namespace tessera::comm
