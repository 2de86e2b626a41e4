// Four ranks of MPI run each of these.
#include <tessera/mpi.h>
#include <tessera/tessera.h>

#include "support/message_of.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

int mpi_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// MPI's ranks of one color, by key.
MPI_Comm split(int color, int key) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, color, key, &part);
  return part;
}

/// The sum of what the group's members have.
double sum_over(const Group& group, double mine) {
  return all_reduce(at::full({1}, mine, at::kDouble), ReduceOp::SUM, group).item<double>();
}

TEST(Mpi, RanksAreThoseOfTheCommunicator) {
  const auto reversed = split(0, -mpi_rank());
  mpi::init(reversed);
  EXPECT_EQ(world_size(), 4);
  EXPECT_EQ(rank(), 3 - mpi_rank());
  EXPECT_EQ(sum_over({}, mpi_rank()), 6);
  EXPECT_THAT(mpi::ranks(MPI_COMM_WORLD), ElementsAre(3, 2, 1, 0));
  shutdown();
  mpi::init();  // another world, of all of MPI's
  EXPECT_EQ(rank(), mpi_rank());
  EXPECT_EQ(sum_over({}, mpi_rank()), 6);
  shutdown();
}

TEST(Mpi, PartsAreGroups) {
  mpi::init();
  const bool is_odd = mpi_rank() % 2 == 1;
  const auto part = split(is_odd, -mpi_rank());
  const auto group = mpi::new_group(part, {.description = "parity"});
  if (is_odd)
    EXPECT_THAT(ranks(group), ElementsAre(3, 1));
  else
    EXPECT_THAT(ranks(group), ElementsAre(2, 0));
  EXPECT_EQ(sum_over(group, mpi_rank()), is_odd ? 4 : 2);
  shutdown();
}

TEST(Mpi, PartsAreWorldsOfTheirOwn) {
  const bool is_low = mpi_rank() < 2;
  mpi::init(split(is_low, mpi_rank()));
  EXPECT_EQ(world_size(), 2);
  EXPECT_EQ(sum_over({}, mpi_rank()), is_low ? 1 : 5);
  shutdown();
  mpi::init(MPI_COMM_SELF);
  EXPECT_EQ(world_size(), 1);
  shutdown();
}

TEST(Mpi, GroupsNeedNoInitOfOurs) {
  init();  // by the variables of the launcher
  ASSERT_EQ(world_size(), 4);
  const auto group = mpi::new_group(split(mpi_rank() / 2, 0));
  EXPECT_EQ(sum_over(group, mpi_rank()), mpi_rank() < 2 ? 1 : 5);
  shutdown();
}

TEST(Mpi, RankThatIsMissingIsNamed) {
  const auto all = split(0, mpi_rank());
  if (mpi_rank() != 3) {
    const auto message = message_of<c10::DistStoreError>([&] { mpi::init(all, {.timeout = 3s}); });
    // A rank that waits behind the missing one in MPI's tree has no address.
    EXPECT_THAT(message, AnyOf(HasSubstr("missing: rank 3"), HasSubstr("missing: ranks"),
                               HasSubstr("say where the ranks meet")));
    EXPECT_FALSE(is_initialized());
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(Mpi, FirstRankThatIsMissingIsTold) {
  const auto all = split(0, mpi_rank());
  if (mpi_rank() != 0) {
    EXPECT_THAT(message_of<c10::DistStoreError>([&] { mpi::init(all, {.timeout = 1s}); }),
                HasSubstr("waited 1 s for rank 0 of the communicator"));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(Mpi, WrongCommunicatorsAreRefused) {
  EXPECT_THAT(message_of<c10::ValueError>([] { mpi::init(MPI_COMM_NULL); }),
              HasSubstr("mpi::init: expected a communicator, got MPI_COMM_NULL"));
  EXPECT_THAT(message_of<c10::ValueError>([] { mpi::init(MPI_COMM_WORLD, {.rank = 1}); }),
              HasSubstr("to be left to the communicator"));
  const auto low = split(mpi_rank() < 2 ? 0 : MPI_UNDEFINED, 0);
  if (mpi_rank() < 2) {
    mpi::init(low);
    EXPECT_THAT(message_of<c10::ValueError>([] { mpi::new_group(MPI_COMM_WORLD); }),
                HasSubstr("rank 2 of the communicator is not in the world of 2 ranks"));
    EXPECT_THAT(message_of<c10::Error>([] { mpi::init(MPI_COMM_WORLD); }),
                HasSubstr("mpi::init: expected no world yet"));
    shutdown();
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  ::testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  MPI_Finalize();
  return status;
}
