// As many ranks as shm allows, on however few cores there are.
#include <tessera/comm.h>

#include "support/ranks.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::expect_equal;
using testing::run_threads;

void use_every_shape_of_traffic() {
  const int64_t ranks = world_size();
  for (const int64_t count : {int64_t{1}, int64_t{1000}, int64_t{50'000}}) {
    const auto mine = torch::full({count}, static_cast<double>(rank() + 1));
    const auto sum = static_cast<double>(ranks * (ranks + 1)) / 2;
    expect_equal(all_reduce(mine), torch::full({count}, sum), "all_reduce");
    const auto expected = torch::arange(1, ranks + 1).to(torch::kFloat).repeat_interleave(count);
    expect_equal(all_gather(mine), expected, "all_gather");
    const auto whole = torch::full({count * ranks}, static_cast<double>(rank() + 1));
    expect_equal(reduce_scatter(whole), torch::full({count}, sum), "reduce_scatter");
    expect_equal(all_to_all(whole), expected, "all_to_all");
    expect_equal(broadcast(mine, static_cast<int>(ranks) - 1),
                 torch::full({count}, static_cast<double>(ranks)), "broadcast");
  }
  barrier();
}

TEST(ManyRanksOnThreads, SixteenRanksAgree) {
  run_threads(16, use_every_shape_of_traffic, {.backend = "shm"});
}

TEST(ManyRanksOnThreads, SixtyFourRanksAgree) {
  run_threads(64, use_every_shape_of_traffic, {.backend = "shm"});
}

TEST(ManyRanksOnThreads, SixtyFiveRanksAreRefusedByName) {
  run_threads(65,
              [] {
                try {
                  init(testing::rank_init_options());
                  ADD_FAILURE() << "expected a ValueError";
                } catch (const c10::ValueError& error) {
                  EXPECT_NE(std::string(error.what()).find("at most 64 ranks"), std::string::npos)
                      << error.what();
                }
              },
              {.backend = "shm", .init = false});
}

}  // namespace
}  // namespace tessera
