#include "comm/backends.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

c10::intrusive_ptr<c10d::Backend> make_rank(int rank, int size) {
  return fake::make({.store = c10::make_intrusive<c10d::HashStore>(),
                     .rank = rank,
                     .size = size,
                     .group_name = "fake",
                     .world_ranks = {},
                     .timeout = std::chrono::seconds(1)});
}

TEST(FakeBackend, StandsForAThousandRanks) {
  auto group = make_rank(777, 1024);
  EXPECT_EQ(group->getRank(), 777);
  EXPECT_EQ(group->getSize(), 1024);
  EXPECT_TRUE(group->barrier()->wait());
  EXPECT_EQ(group->getSequenceNumberForGroup(), 1);
}

TEST(FakeBackend, LeavesReducedTensorsAlone) {
  auto group = make_rank(1, 4);
  Tensors tensors{at::arange(6)};
  auto work = group->allreduce(tensors);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->getFuture()->completed());
  EXPECT_TRUE(work->getFuture()->value().toTensorVector()[0].is_same(tensors[0]));
  EXPECT_TRUE(tensors[0].equal(at::arange(6)));
}

TEST(FakeBackend, RepeatsWhatIsGathered) {
  auto group = make_rank(2, 3);
  auto input = at::arange(4).view({2, 2}).t();
  auto whole = at::zeros({6, 2}, at::kLong);
  group->_allgather_base(whole, input)->wait();
  EXPECT_TRUE(whole.equal(at::cat({input, input, input})));

  TensorLists parts{
      {at::zeros({2, 2}, at::kLong), at::zeros({2, 2}, at::kLong), at::zeros({2, 2}, at::kLong)}};
  Tensors inputs{input};
  group->allgather(parts, inputs)->wait();
  for (const auto& part : parts[0]) EXPECT_TRUE(part.equal(input));
}

TEST(FakeBackend, KeepsTheOwnPartOfWhatIsScattered) {
  auto group = make_rank(1, 3);
  auto input = at::arange(6);
  auto output = at::zeros({2}, at::kLong);
  group->_reduce_scatter_base(output, input)->wait();
  EXPECT_TRUE(output.equal(at::tensor({2, 3}, at::kLong)));

  Tensors one{at::zeros({2}, at::kLong)};
  TensorLists parts{input.tensor_split(3)};
  group->scatter(one, parts, {.rootRank = 1})->wait();
  EXPECT_TRUE(one[0].equal(at::tensor({2, 3}, at::kLong)));
}

TEST(FakeBackend, FillsUnevenSplits) {
  auto group = make_rank(1, 2);
  auto input = at::arange(3);
  auto output = at::full({5}, -1, at::kLong);
  std::vector<int64_t> to{3, 2};
  std::vector<int64_t> from{1, 2};
  group->alltoall_base(output, input, to, from)->wait();
  EXPECT_TRUE(output.equal(at::tensor({0, 0, 0, 1, 2}, at::kLong)));
}

TEST(FakeBackend, IsUnseenByAutograd) {
  auto group = make_rank(0, 2);
  auto input = at::ones({2}).requires_grad_();
  auto output = at::zeros({4});
  group->_allgather_base(output, input)->wait();
  EXPECT_FALSE(output.requires_grad());
}

TEST(FakeBackend, ChecksShapesAndRoots) {
  auto group = make_rank(0, 3);
  auto input = at::arange(4);
  auto output = at::zeros({4}, at::kLong);
  EXPECT_THAT([&] { group->_allgather_base(output, input); },
              ThrowsMessage<c10::ValueError>(
                  HasSubstr("fake: all_gather_into_tensor: expected a tensor of 3 x 4 elements")));
  auto other = at::zeros({12});
  EXPECT_THAT([&] { group->_allgather_base(other, input); },
              ThrowsMessage<c10::TypeError>(HasSubstr("one dtype")));
  Tensors tensors{input};
  EXPECT_THAT([&] { group->broadcast(tensors, {.rootRank = 3}); },
              ThrowsMessage<c10::ValueError>(HasSubstr("expected a root from 0 to 2, got 3")));
  Tensors two{input, input};
  EXPECT_THAT([&] { group->allreduce(two); },
              ThrowsMessage<c10::ValueError>(HasSubstr("one tensor per rank, got 2")));
  std::vector<int64_t> none;
  EXPECT_THAT([&] { group->alltoall_base(output, input, none, none); },
              ThrowsMessage<c10::ValueError>(HasSubstr("4 rows to be divisible by 3 ranks")));
  std::vector<int64_t> splits{2, 1, 2};
  EXPECT_THAT([&] { group->alltoall_base(output, input, splits, splits); },
              ThrowsMessage<c10::ValueError>(HasSubstr("add up to its 4 rows, got 5")));
}

}  // namespace
}  // namespace tessera::comm
