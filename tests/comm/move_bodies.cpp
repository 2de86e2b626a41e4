// Collectives that move tensors and leave them as they are.
#include "comm/collective_bodies.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <numeric>

namespace tessera::collective_bodies {
namespace {

using testing::expect_bitwise_equal;

void broadcasts_from_every_rank(const Setting& setting) {
  for (const auto dtype : dtypes(setting)) {
    for (int root = 0; root < setting.ranks; ++root) {
      for (const int64_t count : {int64_t{3}, int64_t{50'001}}) {
        Tensors tensors{sample(setting, rank(), {count}, dtype, root)};
        default_group()->broadcast(tensors, {.rootRank = root})->wait();
        expect_bitwise_equal(tensors[0], sample(setting, root, {count}, dtype, root),
                             c10::str(dtype, " from ", root));
      }
    }
  }
}

void gathers_lists_and_tensors(const Setting& setting) {
  for (const auto dtype : dtypes(setting)) {
    for (const int64_t rows : {1, 30'001}) {
      SCOPED_TRACE(c10::str(dtype, ", ", rows, " rows"));
      const auto inputs = samples(setting, {rows, 2}, dtype);
      auto input = inputs[rank()].clone();
      auto whole = at::zeros({setting.ranks * rows, 2}, setting.on(dtype));
      backend(setting)->_allgather_base(whole, input, {})->wait();
      expect_bitwise_equal(whole, at::cat(on_cpu(inputs)), "one tensor");

      TensorLists list(1);
      for (int peer = 0; peer < setting.ranks; ++peer)
        list[0].push_back(at::zeros({rows, 2}, setting.on(dtype)));
      Tensors one{input};
      default_group()->allgather(list, one)->wait();
      for (int peer = 0; peer < setting.ranks; ++peer)
        expect_bitwise_equal(list[0][peer], inputs[peer], "list");
    }
  }
}

void all_gather_may_read_from_its_output(const Setting& setting) {
  for (const int64_t count : {int64_t{10}, int64_t{100'001}}) {
    auto whole = at::zeros({setting.ranks, count}, setting.on());
    auto own = whole[rank()];
    own.copy_(pattern(setting, rank(), count));
    backend(setting)->_allgather_base(whole, own, {})->wait();
    for (int peer = 0; peer < setting.ranks; ++peer)
      expect_bitwise_equal(whole[peer], pattern(setting, peer, count));
  }
}

void gathers_parts_of_different_sizes(const Setting& setting) {
  for (const int64_t unit : {1, 40'000}) {
    TensorLists list(1);
    for (int peer = 0; peer < setting.ranks; ++peer)
      list[0].push_back(at::full({peer * unit}, -1, setting.on()));  // rank 0 has nothing
    Tensors input{pattern(setting, rank(), rank() * unit)};
    default_group()->allgather(list, input)->wait();
    for (int peer = 0; peer < setting.ranks; ++peer)
      expect_bitwise_equal(list[0][peer], pattern(setting, peer, peer * unit),
                           c10::str("of ", peer));
  }
}

void gathers_on_and_scatters_from_every_root(const Setting& setting) {
  for (const auto dtype : dtypes(setting)) {
    for (int root = 0; root < setting.ranks; ++root) {
      for (const int64_t count : {int64_t{2}, int64_t{20'001}}) {
        SCOPED_TRACE(c10::str(dtype, ", root ", root, ", ", count, " elements"));
        TensorLists lists;
        if (rank() == root) {
          lists.emplace_back();
          for (int peer = 0; peer < setting.ranks; ++peer)
            lists[0].push_back(at::zeros({count}, setting.on(dtype)));
        }
        Tensors input{sample(setting, rank(), {count}, dtype)};
        default_group()->gather(lists, input, {.rootRank = root})->wait();
        for (int peer = 0; rank() == root && peer < setting.ranks; ++peer)
          expect_bitwise_equal(lists[0][peer], sample(setting, peer, {count}, dtype), "gather");

        Tensors output{at::zeros({count}, setting.on(dtype))};
        default_group()->scatter(output, lists, {.rootRank = root})->wait();
        expect_bitwise_equal(output[0], input[0], "scatter gives back what gather took");
      }
    }
  }
}

/// Rows that `from` sends to `to`: none, a few and many; not symmetric.
int64_t rows_between(int from, int to, int64_t unit) { return ((from + 2 * to) % 4) * unit; }

void exchanges_rows_with_uneven_splits(const Setting& setting) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexDouble, at::kByte}) {
    for (const int64_t unit : {1, 9'001}) {
      SCOPED_TRACE(c10::str(dtype, ", unit ", unit));
      std::vector<int64_t> sent;
      std::vector<int64_t> received;
      Tensors inputs;
      Tensors outputs;
      for (int peer = 0; peer < setting.ranks; ++peer) {
        sent.push_back(rows_between(rank(), peer, unit));
        received.push_back(rows_between(peer, rank(), unit));
        inputs.push_back(sample(setting, rank(), {sent.back(), 2}, dtype, peer));
        outputs.push_back(at::zeros({received.back(), 2}, setting.on(dtype)));
      }
      Tensors expected;
      for (int peer = 0; peer < setting.ranks; ++peer)
        expected.push_back(sample(setting, peer, {received[peer], 2}, dtype, rank()));

      default_group()->alltoall(outputs, inputs)->wait();
      for (int peer = 0; peer < setting.ranks; ++peer)
        expect_bitwise_equal(outputs[peer], expected[peer], c10::str("list, from ", peer));

      auto input = at::cat(inputs);
      auto output = at::zeros_like(at::cat(expected));
      backend(setting)->alltoall_base(output, input, received, sent, {})->wait();
      expect_bitwise_equal(output, at::cat(expected), "one tensor");
    }
  }
}

void exchanges_equal_rows_without_splits(const Setting& setting) {
  for (const int64_t rows : {1, 7, 20'000}) {
    auto input = pattern(setting, rank(), setting.ranks * rows * 3).view({-1, 3});
    auto output = at::zeros_like(input);
    std::vector<int64_t> none;
    backend(setting)->alltoall_base(output, input, none, none, {})->wait();
    for (int peer = 0; peer < setting.ranks; ++peer) {
      const auto theirs = pattern(setting, peer, setting.ranks * rows * 3).view({-1, 3});
      expect_bitwise_equal(output.narrow(0, peer * rows, rows),
                           theirs.narrow(0, rank() * rows, rows));
    }
  }
}

/// One rank has everything and the others nothing.
void exchanges_when_only_one_rank_sends(const Setting& setting) {
  for (const int64_t rows : {0, 5, 100'000}) {
    std::vector<int64_t> sent(setting.ranks, rank() == 0 ? rows : 0);
    std::vector<int64_t> received(setting.ranks, 0);
    received[0] = rows;
    auto input = pattern(setting, 0, rank() == 0 ? setting.ranks * rows : 0);
    auto output = at::zeros({rows}, setting.on());
    backend(setting)->alltoall_base(output, input, received, sent, {})->wait();
    expect_bitwise_equal(output,
                         pattern(setting, 0, setting.ranks * rows).narrow(0, rank() * rows, rows));
  }
}

void moves_bytes_of_any_length(const Setting& setting) {
  const auto text = [](int peer, size_t length) {
    std::string result(length, static_cast<char>('a' + peer));
    if (length > 1) result[length / 2] = '\0';
    return result;
  };
  for (const size_t length : {size_t{0}, size_t{1}, size_t{5}, size_t{700'000}}) {
    for (int source = 0; source < setting.ranks; ++source) {
      const auto own = rank() == source ? text(source, length) : text(rank(), rank() * 3);
      EXPECT_EQ(broadcast_bytes(own, source), text(source, length));
    }
    const auto all = gather_bytes(text(rank(), rank() * length));  // rank 0's are empty
    ASSERT_EQ(all.size(), static_cast<size_t>(setting.ranks));
    for (int peer = 0; peer < setting.ranks; ++peer)
      EXPECT_TRUE(all[peer] == text(peer, peer * length)) << "of " << peer;
  }
  EXPECT_EQ(gather_bytes(""), std::vector<std::string>(setting.ranks));
}

void barriers_let_nobody_pass_early(const Setting& setting) {
  for (int turn = 0; turn < 20; ++turn) {
    // The last to write is the last to arrive: what it wrote must be there for all.
    auto& store = *default_group()->getStore();
    if (rank() == turn % setting.ranks) store.set(c10::str("turn ", turn), "here");
    turn % 2 == 0 || setting.is_nccl() ? barrier() : monitored_barrier();
    EXPECT_TRUE(store.check({c10::str("turn ", turn)})) << turn;
  }
  c10d::BarrierOptions options;
  default_group()->barrier(options)->wait();
  if (!setting.is_nccl()) default_group()->monitoredBarrier(options);
}

}  // namespace

const std::vector<Body>& move_bodies() {
  static const std::vector<Body> kBodies = {
      {"BroadcastsFromEveryRank", broadcasts_from_every_rank, true},
      {"GathersListsAndTensors", gathers_lists_and_tensors, true},
      {"AllGatherMayReadFromItsOutput", all_gather_may_read_from_its_output},
      {"GathersPartsOfDifferentSizes", gathers_parts_of_different_sizes},
      {"GathersOnAndScattersFromEveryRoot", gathers_on_and_scatters_from_every_root},
      {"ExchangesRowsWithUnevenSplits", exchanges_rows_with_uneven_splits},
      {"ExchangesEqualRowsWithoutSplits", exchanges_equal_rows_without_splits},
      {"ExchangesWhenOnlyOneRankSends", exchanges_when_only_one_rank_sends},
      {"MovesBytesOfAnyLength", moves_bytes_of_any_length},
      {"BarriersLetNobodyPassEarly", barriers_let_nobody_pass_early},
  };
  return kBodies;
}

}  // namespace tessera::collective_bodies
