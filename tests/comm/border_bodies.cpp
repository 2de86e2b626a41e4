// Sizes at which a message is cut in another way. A slot of shm holds 256 KiB, 64 Ki floats, at up
// to 8 ranks.
#include "comm/collective_bodies.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

namespace tessera::collective_bodies {
namespace {

using testing::expect_bitwise_equal;

constexpr int64_t kSlot = 64 * 1024;
constexpr int64_t kCounts[] = {1,         kSlot - 1,     kSlot,         kSlot + 1,
                               2 * kSlot, 4 * kSlot + 1, 7 * kSlot - 1, 12 * kSlot + 333};

at::Tensor sum_of_patterns(const Setting& setting, int64_t count) {
  auto total = at::zeros({count}, setting.on());
  for (int peer = 0; peer < setting.ranks; ++peer) total += pattern(setting, peer, count);
  return total;
}

void reduces_at_borders(const Setting& setting) {
  for (const int64_t count : kCounts) {
    SCOPED_TRACE(c10::str(count, " elements"));
    const auto expected = sum_of_patterns(setting, count);
    Tensors tensors{pattern(setting, rank(), count)};
    default_group()->allreduce(tensors)->wait();
    expect_bitwise_equal(tensors[0], expected, "all_reduce");

    const int root = static_cast<int>(count % setting.ranks);
    Tensors rooted{pattern(setting, rank(), count)};
    default_group()->reduce(rooted, {.rootRank = root})->wait();
    expect_bitwise_equal(rooted[0], rank() == root ? expected : pattern(setting, rank(), count),
                         "reduce");
  }
}

void moves_at_borders(const Setting& setting) {
  for (const int64_t count : kCounts) {
    SCOPED_TRACE(c10::str(count, " elements"));
    const int root = static_cast<int>(count % setting.ranks);
    Tensors tensors{pattern(setting, rank(), count)};
    default_group()->broadcast(tensors, {.rootRank = root})->wait();
    expect_bitwise_equal(tensors[0], pattern(setting, root, count), "broadcast");

    auto own = pattern(setting, rank(), count);
    auto whole = at::zeros({setting.ranks, count}, setting.on());
    backend(setting)->_allgather_base(whole, own, {})->wait();
    TensorLists lists;
    if (rank() == root) lists.push_back(at::zeros({setting.ranks, count}, setting.on()).unbind());
    Tensors input{own};
    default_group()->gather(lists, input, {.rootRank = root})->wait();
    for (int peer = 0; peer < setting.ranks; ++peer) {
      expect_bitwise_equal(whole[peer], pattern(setting, peer, count), "all_gather_into_tensor");
      if (rank() == root)
        expect_bitwise_equal(lists[0][peer], pattern(setting, peer, count), "gather");
    }
  }
}

void exchanges_at_borders(const Setting& setting) {
  const int n = setting.ranks;
  // A part of an exchange has 1/n of a slot, less a header in the first.
  const int64_t part = kSlot * 4 / n / 64 * 64 / 4;
  for (const int64_t count : {int64_t{1}, part - 17, part - 16, part - 15, part, part + 1,
                              2 * part - 16, 2 * part - 15, 5 * part + 3, 12 * kSlot / n + 333}) {
    SCOPED_TRACE(c10::str(count, " elements per rank"));
    auto input = pattern(setting, rank(), n * count);
    auto output = at::zeros({n * count}, setting.on());
    std::vector<int64_t> none;
    backend(setting)->alltoall_base(output, input, none, none, {})->wait();
    for (int peer = 0; peer < n; ++peer) {
      expect_bitwise_equal(output.narrow(0, peer * count, count),
                           pattern(setting, peer, n * count).narrow(0, rank() * count, count),
                           "all_to_all");
    }
    const auto expected = sum_of_patterns(setting, n * count).narrow(0, rank() * count, count);
    auto own = at::zeros({count}, setting.on());
    backend(setting)->_reduce_scatter_base(own, input, {})->wait();
    expect_bitwise_equal(own, expected, "reduce_scatter_tensor");

    const int root = static_cast<int>(count % n);
    TensorLists lists;
    if (rank() == root) lists.push_back(input.chunk(n));
    Tensors outputs{at::zeros({count}, setting.on())};
    default_group()->scatter(outputs, lists, {.rootRank = root})->wait();
    expect_bitwise_equal(
        outputs[0], pattern(setting, root, n * count).narrow(0, rank() * count, count), "scatter");
  }
}

void messages_at_borders(const Setting& setting) {
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  if (setting.ranks == 1) return;
  for (const int64_t count : kCounts) {
    Tensors out{pattern(setting, rank(), count)};
    Tensors in{at::zeros({count}, setting.on())};
    auto sent = default_group()->send(out, next, 3);
    auto received = default_group()->recv(in, previous, 3);
    received->wait();
    sent->wait();
    expect_bitwise_equal(in[0], pattern(setting, previous, count), c10::str(count, " elements"));
  }
}

/// Element sizes that do not divide the parts a message is cut into evenly.
void cuts_no_element_in_two(const Setting& setting) {
  for (const auto dtype : {at::kComplexDouble, at::kDouble, at::kHalf, at::kByte}) {
    for (const int64_t bytes : {300'000, 1'000'000}) {
      const auto count = bytes / static_cast<int64_t>(c10::elementSize(dtype)) + 1;
      Tensors tensors{(pattern(setting, rank(), count) / 64).floor().to(dtype)};
      default_group()->allreduce(tensors)->wait();
      auto expected = at::zeros({count}, setting.on(at::kDouble));
      for (int peer = 0; peer < setting.ranks; ++peer)
        expected += (pattern(setting, peer, count) / 64).floor();
      expect_bitwise_equal(tensors[0], expected.to(dtype), c10::str(dtype, ", ", count));
    }
  }
}

}  // namespace

const std::vector<Body>& border_bodies() {
  static const std::vector<Body> kBodies = {
      {"ReducesAtBorders", reduces_at_borders},       {"MovesAtBorders", moves_at_borders},
      {"ExchangesAtBorders", exchanges_at_borders},   {"MessagesAtBorders", messages_at_borders},
      {"CutsNoElementInTwo", cuts_no_element_in_two},
  };
  return kBodies;
}

}  // namespace tessera::collective_bodies
