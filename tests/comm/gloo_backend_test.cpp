// What the gloo backend adds to c10d's: dtypes, operations, layouts, futures and errors.
#include "comm/backends.h"
#include "comm/gloo_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using c10d::ReduceOp;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

bool same(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         (left.numel() == 0 || left.to(at::kComplexDouble).equal(right.to(at::kComplexDouble)));
}

/// Small whole numbers that differ by rank, exact in every dtype.
at::Tensor small_numbers(int rank, at::IntArrayRef sizes, c10::ScalarType dtype) {
  int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count).add(rank).remainder(3).add(rank == 1 ? 1 : 0).view(sizes).to(dtype);
}

/// `op` over the samples of all ranks, in numbers wide enough for each dtype here.
at::Tensor expected(int size, at::IntArrayRef sizes, c10::ScalarType dtype,
                    ReduceOp::RedOpType op) {
  const bool is_complex = c10::isComplexType(dtype);
  const auto wide = is_complex                   ? at::kComplexDouble
                    : c10::isFloatingType(dtype) ? at::kDouble
                                                 : at::kLong;
  auto result = small_numbers(0, sizes, dtype).to(wide);
  for (int rank = 1; rank < size; ++rank) {
    const auto next = small_numbers(rank, sizes, dtype).to(wide);
    switch (op) {
      case ReduceOp::PRODUCT:
        result = result * next;
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, next);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, next);
        break;
      case ReduceOp::BAND:
        result = at::bitwise_and(result, next);
        break;
      case ReduceOp::BOR:
        result = at::bitwise_or(result, next);
        break;
      case ReduceOp::BXOR:
        result = at::bitwise_xor(result, next);
        break;
      default:
        result = result + next;
    }
  }
  if (op == ReduceOp::AVG) {
    if (dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat)
      result = result.to(at::kFloat);
    if (dtype == at::kComplexFloat) result = result.to(at::kComplexFloat);
    result = result / size;
  }
  return result.to(dtype);
}

constexpr c10::ScalarType kDtypes[] = {
    at::kDouble, at::kFloat,  at::kHalf, at::kBFloat16,     at::kChar,
    at::kShort,  at::kInt,    at::kLong, at::kByte,         at::kUInt16,
    at::kUInt32, at::kUInt64, at::kBool, at::kComplexFloat, at::kComplexDouble};
constexpr ReduceOp::RedOpType kOps[] = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                                        ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
                                        ReduceOp::BOR, ReduceOp::BXOR};

bool has_meaning(c10::ScalarType dtype, ReduceOp::RedOpType op) {
  const bool is_bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  const bool is_order = op == ReduceOp::MIN || op == ReduceOp::MAX;
  if (c10::isComplexType(dtype)) return !is_bitwise && !is_order;
  return c10::isFloatingType(dtype) ? !is_bitwise : op != ReduceOp::AVG;
}

TEST(GlooBackend, ReducesEveryDtypeByEveryOperation) {
  run_gloo(3, [](GroupBackend& group, int rank) {
    for (const auto dtype : kDtypes) {
      for (const auto op : kOps) {
        SCOPED_TRACE(c10::str(dtype, " op ", int(op)));
        Tensors tensors{small_numbers(rank, {5, 2}, dtype)};
        if (!has_meaning(dtype, op)) {
          EXPECT_THROW(group.allreduce(tensors, {.reduceOp = op}), c10::TypeError);
          continue;
        }
        const auto want = expected(3, {5, 2}, dtype, op);
        auto work = group.allreduce(tensors, {.reduceOp = op});
        work->wait();
        EXPECT_TRUE(same(tensors[0], want)) << tensors[0] << want;

        Tensors rooted{small_numbers(rank, {5, 2}, dtype)};
        group.reduce(rooted, {.reduceOp = op, .rootRank = 2})->wait();
        EXPECT_TRUE(same(rooted[0], rank == 2 ? want : small_numbers(rank, {5, 2}, dtype)))
            << rooted[0];

        auto input = small_numbers(rank, {6, 2}, dtype);
        auto part = at::zeros({2, 2}, input.options());
        group._reduce_scatter_base(part, input, {.reduceOp = op})->wait();
        EXPECT_TRUE(same(part, expected(3, {6, 2}, dtype, op).slice(0, 2 * rank, 2 * rank + 2)))
            << part;
      }
    }
  });
}

TEST(GlooBackend, MovesEveryDtype) {
  run_gloo(3, [](GroupBackend& group, int rank) {
    for (const auto dtype : kDtypes) {
      SCOPED_TRACE(c10::str(dtype));
      Tensors tensors{small_numbers(rank, {4}, dtype)};
      group.broadcast(tensors, {.rootRank = 1})->wait();
      EXPECT_TRUE(same(tensors[0], small_numbers(1, {4}, dtype)));

      auto input = small_numbers(rank, {2, 2}, dtype);
      auto whole = at::zeros({6, 2}, input.options());
      group._allgather_base(whole, input)->wait();
      for (int peer = 0; peer < 3; ++peer) {
        EXPECT_TRUE(
            same(whole.slice(0, 2 * peer, 2 * peer + 2), small_numbers(peer, {2, 2}, dtype)));
      }

      TensorLists lists{{at::zeros({1}, input.options()), at::zeros({2}, input.options()),
                         at::zeros({3}, input.options())}};
      Tensors uneven{small_numbers(rank, {rank + 1}, dtype)};
      group.allgather(lists, uneven)->wait();
      for (int peer = 0; peer < 3; ++peer)
        EXPECT_TRUE(same(lists[0][peer], small_numbers(peer, {peer + 1}, dtype)));

      Tensors outputs{at::zeros({2}, input.options()), at::zeros({2}, input.options()),
                      at::zeros({2}, input.options())};
      Tensors inputs{small_numbers(rank, {2}, dtype), small_numbers(rank + 1, {2}, dtype),
                     small_numbers(rank + 2, {2}, dtype)};
      group.alltoall(outputs, inputs)->wait();
      for (int peer = 0; peer < 3; ++peer)
        EXPECT_TRUE(same(outputs[peer], small_numbers(peer + rank, {2}, dtype)));

      TensorLists gathered;
      if (rank == 1) gathered.push_back(outputs);
      Tensors one{small_numbers(rank, {2}, dtype)};
      group.gather(gathered, one, {.rootRank = 1})->wait();
      for (int peer = 0; rank == 1 && peer < 3; ++peer)
        EXPECT_TRUE(same(outputs[peer], small_numbers(peer, {2}, dtype)));
      TensorLists scattered;
      if (rank == 1) scattered.push_back(outputs);
      Tensors mine{at::zeros({2}, input.options())};
      group.scatter(mine, scattered, {.rootRank = 1})->wait();
      EXPECT_TRUE(same(mine[0], small_numbers(rank, {2}, dtype)));
    }
  });
}

TEST(GlooBackend, ExchangesUnevenRows) {
  run_gloo(3, [](GroupBackend& group, int rank) {
    std::vector<int64_t> sent{0, rank, 2};  // to each peer
    std::vector<int64_t> received = rank == 0   ? std::vector<int64_t>{0, 0, 0}
                                    : rank == 1 ? std::vector<int64_t>{0, 1, 2}
                                                : std::vector<int64_t>{2, 2, 2};
    const auto rows = [](const std::vector<int64_t>& splits) {
      return splits[0] + splits[1] + splits[2];
    };
    auto input = at::full({rows(sent), 3}, rank, at::kShort);
    auto output = at::full({rows(received), 3}, -1, at::kShort);
    group.alltoall_base(output, input, received, sent)->wait();
    int64_t row = 0;
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(output.narrow(0, row, received[peer]).eq(peer).all().item<bool>()) << output;
      row += received[peer];
    }
  });
}

TEST(GlooBackend, TakesTensorsOfAnyLayout) {
  run_gloo(2, [](GroupBackend& group, int rank) {
    auto base = at::full({4, 6}, rank + 1.0);
    Tensors strided{base.t().slice(0, 0, 6, 2)};
    group.allreduce(strided)->wait();
    EXPECT_TRUE(strided[0].eq(3).all().item<bool>());
    EXPECT_TRUE(base.t().slice(0, 1, 6, 2).eq(rank + 1).all().item<bool>())
        << "what lies between stays";

    auto whole = at::zeros({3, 4}).t();
    auto input = at::arange(6).to(at::kFloat).view({3, 2}).t();
    group._allgather_base(whole, input)->wait();
    EXPECT_TRUE(whole.equal(at::cat({input, input})));

    auto conjugate = at::conj(at::complex(at::ones({2}), at::ones({2})));
    Tensors conjugates{conjugate};
    group.allreduce(conjugates)->wait();
    EXPECT_TRUE(at::imag(conjugate).eq(-2).all().item<bool>());

    Tensors expanded{at::ones({1}).expand({3})};
    EXPECT_THAT([&] { group.allreduce(expanded); },
                ThrowsMessage<c10::ValueError>(HasSubstr("share memory")));
    Tensors sparse{at::ones({2}).to_sparse()};
    EXPECT_THAT([&] { group.allreduce(sparse); },
                ThrowsMessage<c10::ValueError>(HasSubstr("dense")));
  });
}

TEST(GlooBackend, TakesScalarsAndNothing) {
  run_gloo(3, [](GroupBackend& group, int rank) {
    Tensors scalar{at::scalar_tensor(rank + 1, at::kHalf)};
    group.allreduce(scalar, {.reduceOp = ReduceOp::AVG})->wait();
    EXPECT_EQ(scalar[0].item<float>(), 2);
    for (const auto dtype : {at::kFloat, at::kHalf, at::kShort, at::kComplexFloat}) {
      Tensors empty{at::empty({0, 3}, dtype)};
      group.allreduce(empty)->wait();
      group.broadcast(empty)->wait();
      group.reduce(empty)->wait();
      auto whole = at::empty({0}, dtype);
      group._allgather_base(whole, empty[0])->wait();
      group._reduce_scatter_base(empty[0], whole)->wait();
    }
    Tensors none;
    group.allreduce_coalesced(none)->wait();
  });
}

TEST(GlooBackend, AccumulatesHalfTypesInFloat) {
  run_gloo(4, [](GroupBackend& group, int rank) {
    // 2048 + 1 is 2048 in half precision, 2048 + 3 is not.
    Tensors tensors{at::full({3}, rank == 0 ? 2048 : 1, at::kHalf)};
    group.allreduce(tensors)->wait();
    EXPECT_TRUE(tensors[0].to(at::kFloat).eq(2052).all().item<bool>())
        << tensors[0];  // 2051, rounded once
    Tensors nans{at::full({3}, rank == 2 ? NAN : rank, at::kFloat)};
    group.allreduce(nans, {.reduceOp = ReduceOp::MAX})->wait();
    EXPECT_TRUE(nans[0].isnan().all().item<bool>());
  });
}

TEST(GlooBackend, CoalescesByListAndByScope) {
  run_gloo(2, [](GroupBackend& group, int rank) {
    Tensors tensors{at::full({3}, rank + 1.0), at::full({2, 2}, 10 * (rank + 1.0)).t(),
                    at::empty({0})};
    group.allreduce_coalesced(tensors)->wait();
    EXPECT_TRUE(tensors[0].eq(3).all().item<bool>());
    EXPECT_TRUE(tensors[1].eq(30).all().item<bool>());
    Tensors mixed{at::full({3}, rank + 1, at::kHalf), at::full({3}, rank + 1, at::kLong)};
    group.allreduce_coalesced(mixed)->wait();
    EXPECT_TRUE(mixed[1].eq(3).all().item<bool>());
    Tensors inputs{at::full({2}, rank, at::kLong), at::full({1}, rank, at::kHalf)};
    Tensors outputs{at::zeros({4}, at::kLong), at::zeros({2}, at::kHalf)};
    group.allgather_into_tensor_coalesced(outputs, inputs)->wait();
    EXPECT_TRUE(outputs[0].equal(at::tensor({0, 0, 1, 1}, at::kLong)));
    Tensors parts{at::zeros({2}, at::kLong), at::zeros({1}, at::kHalf)};
    group.reduce_scatter_tensor_coalesced(parts, outputs)->wait();
    EXPECT_TRUE(parts[0].eq(2 * rank).all().item<bool>());

    Tensors one{at::full({2}, rank, at::kFloat)};
    Tensors two{at::full({2}, rank, at::kInt)};
    Tensors mail{at::full({2}, rank, at::kShort)};
    group.startCoalescing();
    group.allreduce(one);
    group.broadcast(two, {.rootRank = 1});
    rank == 0 ? group.send(mail, 1, 0) : group.recv(mail, 0, 0);
    EXPECT_TRUE(group.endCoalescing()->wait());
    EXPECT_TRUE(one[0].eq(1).all().item<bool>());
    EXPECT_TRUE(two[0].eq(1).all().item<bool>());
    EXPECT_TRUE(mail[0].eq(0).all().item<bool>());
  });
}

TEST(GlooBackend, CompletesFuturesAndPolledWorkAfterTheLastCopy) {
  run_gloo(2, [](GroupBackend& group, int rank) {
    auto target = at::full({2, 3}, rank + 1, at::kBFloat16).t();
    Tensors tensors{target};
    auto work = group.allreduce(tensors, {.reduceOp = ReduceOp::AVG});
    const auto right = work->getFuture()->then(
        [](c10::ivalue::Future& future) {
          return c10::IValue(
              future.value().toTensorVector()[0].to(at::kFloat).eq(1.5).all().item<bool>());
        },
        c10::BoolType::get());
    right->waitAndThrow();
    work->wait();
    EXPECT_TRUE(right->value().toBool());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_TRUE(work->result()[0].is_same(target));
    EXPECT_GE(work->getDuration(), 0);

    auto mail = at::full({2, 2}, rank, at::kUInt16).t();
    Tensors letter{mail.slice(0, 0, 1)};
    auto point = rank == 0 ? group.send(letter, 1, 7) : group.recvAnysource(letter, 7);
    while (!point->isCompleted()) std::this_thread::yield();
    point->getFuture()->waitAndThrow();
    EXPECT_TRUE(point->wait());
    EXPECT_TRUE(letter[0].to(at::kLong).eq(0).all().item<bool>());
    if (rank == 1) {
      EXPECT_EQ(point->sourceRank(), 0);
    }
    EXPECT_EQ(group.getSequenceNumberForGroup(), 1) << "of collectives, equal on all ranks";
  });
}

TEST(GlooBackend, IsUnseenByAutograd) {
  run_gloo(2, [](GroupBackend& group, int) {
    Tensors leaf{at::ones({2, 2}).t().requires_grad_()};
    group.allreduce(leaf)->wait();
    EXPECT_TRUE(leaf[0].is_leaf());
    auto input = at::ones({2}).requires_grad_();
    auto output = at::zeros({4});
    group._allgather_base(output, input)->wait();
    EXPECT_FALSE(output.requires_grad());
  });
}

TEST(GlooBackend, WorksAlone) {
  run_gloo(1, [](GroupBackend& group, int) {
    Tensors tensors{at::full({2}, 3, at::kHalf)};
    group.allreduce(tensors, {.reduceOp = ReduceOp::AVG})->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 3);
    auto part = at::zeros({2});
    auto whole = at::ones({2});
    group._reduce_scatter_base(part, whole)->wait();
    group._allgather_base(whole, part)->wait();
    group.barrier()->wait();
    group.monitoredBarrier({}, true);
    EXPECT_EQ(whole.sum().item<float>(), 2);
  });
}

TEST(GlooBackend, TakesListsThatRanksCutIntoCallsDifferently) {
  run_gloo(2, [](GroupBackend& group, int rank) {
    Tensors inputs{at::full({2}, rank + 1.0), at::full({3}, rank + 10.0)};
    Tensors outputs{at::zeros({4}), at::zeros({6})};
    if (rank == 0) {
      group.allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
    } else {
      for (size_t i = 0; i < inputs.size(); ++i)
        group._allgather_base(outputs[i], inputs[i], {})->wait();
    }
    EXPECT_TRUE(outputs[0].equal(at::tensor({1., 1., 2., 2.}, at::kFloat)));
    EXPECT_TRUE(outputs[1].equal(at::tensor({10., 10., 10., 11., 11., 11.}, at::kFloat)));
  });
}

}  // namespace
}  // namespace tessera::comm
