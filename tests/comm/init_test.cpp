#include "comm/collective_cases.h"
#include "comm/context.h"
#include "comm/errors_of_calls.h"
#include "support/forked_ranks.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::Beacon;
using ::testing::HasSubstr;
using testing::rank_init_options;
using testing::run_forked_worlds;
using testing::run_processes;
using testing::run_rank;
using testing::run_threads;

/// Text of whatever error `call` throws.
std::string any_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Init, IsNeededByEverythingAndEveryErrorSaysSo) {
  const ContextScope outside;
  ASSERT_FALSE(is_initialized());
  const auto tensor = at::ones({2});
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"rank", [] { rank(); }},
      {"world_size", [] { world_size(); }},
      {"local_rank", [] { local_rank(); }},
      {"default_group", [] { default_group(); }},
      {"new_group", [] { new_group({0}); }},
      {"rank", [] { rank(Group()); }},
      {"world_size", [] { world_size(Group()); }},
      {"ranks", [] { ranks(Group()); }},
      {"barrier", [] { barrier(); }},
      {"monitored_barrier", [] { monitored_barrier(); }},
      {"broadcast_bytes", [] { broadcast_bytes(""); }},
      {"gather_bytes", [] { gather_bytes(""); }},
      {"all_reduce", [&] { all_reduce(tensor); }},
      {"all_gather", [&] { all_gather(tensor); }},
      {"reduce_scatter", [&] { reduce_scatter(tensor); }},
      {"all_to_all", [&] { all_to_all(tensor); }},
      {"broadcast", [&] { broadcast(tensor); }},
      {"empty_shared", [] { empty_shared({2}); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_THAT(
        any_error_of(call),
        AllOf(::testing::StartsWith(name + ": expected tessera::init() to have been called"),
              HasSubstr("call tessera::init() first")));
  }
}

TEST(Init, TwiceIsAnErrorThatNamesTheWorld) {
  run_threads(2, [] {
    EXPECT_THAT(any_error_of([] { init(rank_init_options()); }),
                AllOf(HasSubstr("init: expected no world yet, but this rank is already rank " +
                                std::to_string(rank()) + " of 2"),
                      HasSubstr("call tessera::shutdown() first")));
    barrier();  // the world is as it was
  });
}

TEST(Init, LogsWhatItChoseWhereTheVariableAsks) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a program that has logged nothing yet
  EXPECT_EXIT(
      {
        setenv("TORCH_CPP_LOG_LEVEL", "INFO", 1);
        init();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "tessera: group 'world': (shm|gloo|nccl) for");
}

TEST(Shutdown, MayBeCalledTwiceOrWithoutInitAndAllowsAnotherInit) {
  run_threads(2,
              [] {
                shutdown();
                for (int time = 0; time < 3; ++time) {
                  init(rank_init_options());
                  call_all_reduce(sample(rank(), kSmall));
                  shutdown();
                  shutdown();
                  EXPECT_FALSE(is_initialized());
                }
              },
              {.init = false});
}

TEST(Shutdown, MakesAGroupThatIsKeptRefuseAndItsWorkEnd) {
  run_threads(2, [] {
    const auto kept = default_group();
    const int peer = 1 - rank();
    barrier();
    Tensors letter{at::zeros({1})};
    const auto receive = kept->recv(letter, peer, 0);
    const auto future = receive->getFuture();
    shutdown();
    EXPECT_THAT(error_of([&] { receive->wait(); }),
                HasSubstr("group 'world' was shut down before the message came"));
    future->wait();
    EXPECT_TRUE(future->hasError());
    EXPECT_THAT(error_of([&] { kept->barrier()->wait(); }),
                HasSubstr("group 'world' has been shut down"));
    Tensors answer{at::zeros({1})};
    EXPECT_THAT(error_of([&] { kept->send(answer, peer, 0); }),
                HasSubstr("group 'world' has been shut down"));
  });
}

TEST(Shutdown, CompletesWhatNobodyWaitedFor) {
  run_threads(2, [] {
    std::vector<Tensors> tensors;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back({sample(rank(), i % 3 == 0 ? kLarge : kSmall)});
      default_group()->allreduce(tensors.back());
    }
    // More messages than fit under way at once: the last ones wait for the receiver.
    std::vector<c10::intrusive_ptr<c10d::Work>> received;
    std::vector<Tensors> letters;
    for (int i = 0; i < 30; ++i) {
      letters.push_back({rank() == 0 ? sample(i, kSmall) : at::zeros({kSmall})});
      if (rank() == 0) default_group()->send(letters.back(), 1, 0);
    }
    for (int i = 0; i < 30 && rank() == 1; ++i) {
      default_group()->recv(letters[i], 0, 0)->wait();
      expect_same(letters[i][0], sample(i, kSmall));
    }
    const auto sums =
        std::vector{sample(0, kLarge) + sample(1, kLarge), sample(0, kSmall) + sample(1, kSmall)};
    shutdown();
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(tensors[i][0].equal(sums[i % 3 == 0 ? 0 : 1]));
  });
}

TEST(Shutdown, IsSafeAfterErrorsAndTheNextWorldWorks) {
  run_threads(2, [] {
    Tensors tensors{at::ones({rank() + 1})};
    EXPECT_THAT(error_of([&] { default_group()->allreduce(tensors)->wait(); }),
                HasSubstr("the ranks disagree"));
    shutdown();
    init(rank_init_options());
    call_all_reduce(sample(rank(), kSmall));
  });
}

TEST(InitError, LeavesTheStoreFitForAnotherTry) {
  run_threads(2,
              [] {
                auto options = rank_init_options();
                options.backend = "nccl";
                if (!tessera::supports("nccl", at::kCUDA, at::kFloat)) {
                  EXPECT_THAT(any_error_of([&] { init(options); }), HasSubstr("nccl"));
                }
                EXPECT_FALSE(is_initialized());
                init(rank_init_options());
                barrier();
              },
              {.init = false});
}

TEST(InitError, NamesRanksOutsideTheWorldAndBadOptions) {
  const ContextScope scope;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto with = [&](int rank, int size, std::chrono::milliseconds timeout = 1s) {
    InitOptions options;
    options.rank = rank;
    options.world_size = size;
    options.store = store;
    options.timeout = timeout;
    return any_error_of([&] { init(options); });
  };
  EXPECT_THAT(
      with(2, 2),
      HasSubstr("init: expected a rank from 0 to 1 in a world of size 2, got 2; number the ranks"));
  EXPECT_THAT(with(-1, 2), HasSubstr("in a world of size 2, got -1"));
  EXPECT_THAT(with(0, 0), HasSubstr("init: expected a world size of at least 1, got 0"));
  EXPECT_THAT(with(0, 1, 0ms), HasSubstr("init: expected a timeout above 0, got 0 ms"));
  InitOptions incomplete;
  incomplete.store = store;
  EXPECT_THAT(any_error_of([&] { init(incomplete); }),
              HasSubstr("init: a store needs rank and world_size next to it"));
}

TEST(InitError, SaysBothWorldSizesAndWhoIsMissing) {
  run_threads(3,
              [] {
                auto options = rank_init_options();
                options.timeout = 20s;
                if (run_rank() == 2) options.world_size = 4;
                EXPECT_THAT(any_error_of([&] { init(options); }),
                            AllOf(HasSubstr("init: the ranks disagree on the world size"),
                                  HasSubstr("says 3"), HasSubstr("says 4")));
              },
              {.init = false});
  run_threads(2,
              [] {
                auto options = rank_init_options();
                options.world_size = 3;
                options.timeout = 400ms;
                const auto begun = Clock::now();
                EXPECT_THAT(any_error_of([&] { init(options); }), HasSubstr("missing: rank 2"));
                EXPECT_LT(Clock::now() - begun, 10s);
                EXPECT_FALSE(is_initialized());
              },
              {.init = false});
}

TEST(Init, NamesWhoIsMissingFromANewGroup) {
  run_threads(2, [] {
    if (rank() == 0) {
      EXPECT_THAT(error_of([] { new_group({0, 1}, {.timeout = 400ms}); }),
                  AllOf(HasSubstr("new_group: group 'ranks 0,1'"), HasSubstr("misses rank 1")));
      Beacon("done").signal();
    }
    EXPECT_TRUE(Beacon("done").wait());
  });
}

TEST(Init, MakesTwoWorldsOfTheThreadsOfOneProcess) {
  const std::vector stores = {c10::make_intrusive<c10d::HashStore>(),
                              c10::make_intrusive<c10d::HashStore>()};
  run_threads(4,
              [&] {
                const int world = run_rank() / 2;
                auto options = rank_init_options();
                options.rank = run_rank() % 2;
                options.world_size = 2;
                options.local_rank = options.rank;
                options.store = stores[world];
                init(options);
                Tensors tensors{at::full({3}, 1 + 10 * world)};
                default_group()->allreduce(tensors)->wait();
                EXPECT_TRUE(tensors[0].equal(at::full({3}, 2 + 20 * world)));
                call_all_reduce(sample(rank(), kLarge));
              },
              {.init = false});
}

int free_port() {
  const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(descriptor, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(descriptor);
  return ntohs(address.sin_port);
}

TEST(Init, MeetsThroughATcpAddressOrAFile) {
  const testing::TemporaryFolder folder;
  for (const auto& method : {"tcp://127.0.0.1:" + std::to_string(free_port()),
                             "file://" + (folder.path() / "store").string()}) {
    SCOPED_TRACE(method);
    run_threads(3,
                [&] {
                  auto options = rank_init_options();
                  options.store = {};
                  options.init_method = method;
                  for (int time = 0; time < 2; ++time) {
                    init(options);
                    EXPECT_EQ(world_size(), 3);
                    call_all_reduce(sample(rank(), kSmall));
                    shutdown();
                  }
                },
                {.init = false});
  }
}

TEST(InitOnProcesses, LeavesNoFileBehind) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() / "store";
  run_processes(
      2,
      [] {
        auto options = rank_init_options();
        options.init_method = std::string("file://") + std::getenv("TESSERA_TEST_STORE");
        for (int time = 0; time < 2; ++time) {
          init(options);
          barrier();
          shutdown();
        }
      },
      {.init = false, .environment = {{"TESSERA_TEST_STORE", path.string()}}, .fresh = true});
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Exit, WithoutShutdownEndsWell) {
  const auto exit_with_work_under_way = [] {
    static std::vector<Tensors>& tensors = *new std::vector<Tensors>();
    for (const auto count : {kSmall, kLarge, kSmall}) {
      tensors.push_back({sample(rank(), count)});
      default_group()->allreduce(tensors.back());
    }
    std::exit(0);
  };
  run_forked_worlds({
      {.name = "AtOnce", .body = [] { std::exit(0); }},
      {.name = "WithWorkUnderWay", .ranks = 3, .body = exit_with_work_under_way},
      {.name = "AfterShutdown", .body = [] { shutdown(), std::exit(0); }},
  });
}

/// Forks a child that ends as `how` says; the rank and its peers go on as if nothing had been.
void fork_in_the_middle(const std::function<void(at::Tensor&, Group&)>& how) {
  auto kept = default_group();
  auto tensor = shared_sample(rank(), kLarge);
  Tensors other{sample(rank(), kLarge)};
  const auto future = kept->allreduce(other)->getFuture();  // starts the group's thread
  future->wait();
  Tensors letter{at::zeros({1})};
  const auto receive = kept->recv(letter, 1 - rank(), 0);
  const auto mail_future = receive->getFuture();  // and the other one
  const pid_t child = fork();
  if (child == 0) {
    how(tensor, kept);
    std::exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_same(tensor, sample(rank(), kLarge));  // not freed under our hands
  barrier();
  call_all_reduce(tensor);
  Tensors answer{at::ones({1})};
  kept->send(answer, 1 - rank(), 0)->wait();
  receive->wait();
}

TEST(ForkedChild, EndsWithoutTakingItsParentsGroupsAlong) {
  const auto world = [](const std::function<void(at::Tensor&, Group&)>& how) {
    return [how] { fork_in_the_middle(how); };
  };
  run_forked_worlds({
      {.name = "Exits", .body = world([](at::Tensor&, Group&) {})},
      {.name = "ShutsDown", .body = world([](at::Tensor&, Group&) { shutdown(); })},
      {.name = "LetsGo", .body = world([](at::Tensor& tensor, Group& group) {
                           tensor.reset();
                           group.reset();
                           shutdown();
                         })},
      {.name = "JoinsAWorldOfItsOwn",
       .body = world([](at::Tensor& tensor, Group&) {
         shutdown();
         init({.rank = 0, .world_size = 1, .store = c10::make_intrusive<c10d::HashStore>()});
         tensor = shared_sample(0, kLarge);
         call_all_reduce(tensor);
         shutdown();
       })},
  });
}

class ShutdownOfStuckGroups : public ::testing::TestWithParam<std::string> {};

TEST_P(ShutdownOfStuckGroups, GivesUpAfterTenSecondsForAllOfThem) {
  const auto body = [] {
    std::vector<Group> groups;
    for (int i = 0; i < 3; ++i) groups.push_back(new_group({0, 1}));
    if (rank() == 1) {
      EXPECT_TRUE(Beacon("given up").wait());
      return;
    }
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (const auto& group : groups)
      works.push_back(group->allreduce(tensors.emplace_back(Tensors{sample(0, kLarge)})));
    const auto begun = Clock::now();
    shutdown();
    EXPECT_LT(Clock::now() - begun, 14s);
    for (const auto& work : works) {
      EXPECT_THAT(error_of([&] { work->wait(); }),
                  AnyOf(HasSubstr("timed out after"), HasSubstr("given up")));
    }
    Beacon("given up").signal();
  };
  run_processes(2, body, {.backend = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Backends, ShutdownOfStuckGroups, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tessera::comm::shm
