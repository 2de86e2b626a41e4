#include "comm/collective_cases.h"
#include "comm/errors_of_calls.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <signal.h>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::Beacon;
using ::testing::HasSubstr;
using testing::RankProcesses;

TEST(Interrupt, EndsARankThatWaitsAtOnceAndItsPeersNotice) {
  RankProcesses processes(
      3,
      [] {
        barrier();
        Beacon("begun." + std::to_string(rank())).signal();
        EXPECT_TRUE(rank() != 2 || Beacon("go").wait());
        EXPECT_THAT(error_of([] { call_all_reduce(sample(rank(), kLarge)); }),
                    AllOf(HasSubstr("all_reduce #2 (262144 float32, 1 MiB, sum) in group 'world'"),
                          HasSubstr("rank 1 (process "), HasSubstr(") died")));
      },
      {.may_die = {1}});
  ASSERT_TRUE(processes.beacon("begun.1").wait());
  const auto begun = Clock::now();
  processes.signal(1, SIGINT);
  const auto status = processes.wait(1, 10s);
  EXPECT_LT(Clock::now() - begun, 2s);
  ASSERT_TRUE(status);
  EXPECT_EQ(status->signal, SIGINT);
  EXPECT_TRUE(processes.wait(0, 10s))
      << "waits for the dead rank although the third has not come yet";
  processes.beacon("go").signal();
  processes.join();
}

TEST(Interrupt, ReachesAllRanksOfAJob) {
  RankProcesses processes(2,
                          [] {
                            Beacon("begun." + std::to_string(rank())).signal();
                            Tensors tensors{at::zeros({1})};
                            default_group()->recv(tensors, 1 - rank(), 0)->wait();
                          },
                          {.may_die = {0, 1}});
  for (const int rank : {0, 1})
    ASSERT_TRUE(processes.beacon("begun." + std::to_string(rank)).wait());
  for (const int rank : {0, 1}) processes.signal(rank, SIGINT);
  for (const int rank : {0, 1})
    EXPECT_EQ(processes.wait(rank, 10s).value_or(testing::ExitStatus{}).signal, SIGINT);
  processes.join();
}

}  // namespace
}  // namespace tessera::comm::shm
