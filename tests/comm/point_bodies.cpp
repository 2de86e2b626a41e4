// Messages between two ranks.
#include "comm/collective_bodies.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <random>
#include <set>

namespace tessera::collective_bodies {
namespace {

using testing::expect_bitwise_equal;

WorkPtr send(const at::Tensor& tensor, int destination, int tag = 0) {
  Tensors one{tensor};
  return default_group()->send(one, destination, tag);
}
WorkPtr receive(const at::Tensor& tensor, int source, int tag = 0) {
  Tensors one{tensor};
  return default_group()->recv(one, source, tag);
}

/// Tells a message by who sent it to whom, with which tag, as which of how many.
at::Tensor letter(const Setting& setting, int from, int to, int tag, int number,
                  int64_t count = 3) {
  return at::full({count}, ((from * 8 + to) * 100 + tag) * 1000 + number, setting.on(at::kLong));
}

void sends_every_dtype(const Setting& setting) {
  if (setting.ranks == 1) return;
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  for (const auto dtype : dtypes(setting)) {
    auto sent = send(sample(setting, rank(), {4, 3}, dtype), next);
    auto in = at::zeros({4, 3}, setting.on(dtype));
    receive(in, previous)->wait();
    sent->wait();
    expect_bitwise_equal(in, sample(setting, previous, {4, 3}, dtype), c10::toString(dtype));
  }
}

/// Each message meets a rank that has nothing else to do.
void messages_in_turns(const Setting& setting) {
  if (setting.ranks % 2 != 0) return;
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  for (const int64_t count : {int64_t{3}, int64_t{200'000}}) {
    for (const int sender : {0, 1}) {
      auto in = at::zeros({count}, setting.on(at::kLong));
      if (rank() % 2 == sender) {
        send(letter(setting, rank(), next, 0, sender, count), next)->wait();
      } else {
        receive(in, previous)->wait();
        expect_bitwise_equal(in, letter(setting, previous, rank(), 0, sender, count));
      }
    }
  }
}

void keeps_the_order_within_a_tag(const Setting& setting) {
  constexpr int kMessages = 60;  // more than can be under way at once
  if (setting.ranks == 1) return;
  std::vector<WorkPtr> works;
  std::vector<std::pair<at::Tensor, at::Tensor>> received;
  for (int number = 0; number < kMessages; ++number) {
    for (int peer = 0; peer < setting.ranks; ++peer) {
      if (peer == rank()) continue;
      const int tag = number % 2;
      works.push_back(send(letter(setting, rank(), peer, tag, number), peer, tag));
      received.emplace_back(at::zeros({3}, setting.on(at::kLong)),
                            letter(setting, peer, rank(), tag, number));
      works.push_back(receive(received.back().first, peer, tag));
    }
  }
  for (const auto& work : works) work->wait();
  for (const auto& [actual, expected] : received) expect_bitwise_equal(actual, expected);
}

void waits_in_any_order(const Setting& setting) {
  if (setting.ranks == 1) return;
  std::mt19937 random(17 * rank() + 1);  // another order on every rank
  for (int turn = 0; turn < 5; ++turn) {
    std::vector<WorkPtr> works;
    std::vector<std::pair<at::Tensor, at::Tensor>> received;
    for (int tag = 0; tag < 12; ++tag) {
      for (int peer = 0; peer < setting.ranks; ++peer) {
        if (peer == rank()) continue;
        const int64_t count = tag % 4 == 0 ? 50'000 : 5;
        received.emplace_back(at::zeros({count}, setting.on(at::kLong)),
                              letter(setting, peer, rank(), tag, turn, count));
        works.push_back(receive(received.back().first, peer, tag));
        works.push_back(send(letter(setting, rank(), peer, tag, turn, count), peer, tag));
      }
    }
    std::shuffle(works.begin(), works.end(), random);
    for (const auto& work : works) work->wait();
    for (const auto& [actual, expected] : received) expect_bitwise_equal(actual, expected);
  }
}

void takes_tags_in_another_order_than_sent(const Setting& setting) {
  constexpr int kTags = 40;  // more than can be under way at once
  if (setting.ranks == 1 || rank() > 1) return barrier();
  if (rank() == 0) {
    std::vector<WorkPtr> works;
    for (int tag = 0; tag < kTags; ++tag)
      works.push_back(send(letter(setting, 0, 1, tag, 0), 1, tag));
    for (const auto& work : works) work->wait();
  } else {
    for (int tag = kTags - 1; tag >= 0; --tag) {
      auto in = at::zeros({3}, setting.on(at::kLong));
      receive(in, 0, tag)->wait();
      expect_bitwise_equal(in, letter(setting, 0, 1, tag, 0));
    }
  }
  barrier();
}

void crossing_large_messages_do_not_block(const Setting& setting) {
  constexpr int64_t kCount = 1'500'000;  // 12 MB each way
  if (setting.ranks == 1) return;
  std::vector<WorkPtr> works;
  std::vector<std::pair<int, at::Tensor>> received;
  for (int peer = 0; peer < setting.ranks; ++peer) {
    if (peer == rank()) continue;
    works.push_back(send(letter(setting, rank(), peer, 0, 0, kCount / setting.ranks), peer));
  }
  for (int peer = 0; peer < setting.ranks; ++peer) {
    if (peer == rank()) continue;
    received.emplace_back(peer, at::zeros({kCount / setting.ranks}, setting.on(at::kLong)));
    works.push_back(receive(received.back().second, peer));
  }
  for (const auto& work : works) work->wait();
  for (const auto& [peer, tensor] : received)
    expect_bitwise_equal(tensor, letter(setting, peer, rank(), 0, 0, kCount / setting.ranks));
}

void receives_from_any_source(const Setting& setting) {
  constexpr int kEach = 20;
  if (rank() != 0) {
    for (int number = 0; number < kEach; ++number)
      send(letter(setting, rank(), 0, 5, number), 0, 5)->wait();
    return barrier();
  }
  std::vector<int> next(setting.ranks, 0);
  for (int i = 0; i < kEach * (setting.ranks - 1); ++i) {
    Tensors in{at::zeros({3}, setting.on(at::kLong))};
    auto work = default_group()->recvAnysource(in, 5);
    work->wait();
    const int source = work->sourceRank();
    ASSERT_TRUE(source > 0 && source < setting.ranks) << source;
    expect_bitwise_equal(in[0], letter(setting, source, 0, 5, next[source]++));
  }
  barrier();
}

/// A receive is served while its rank is busy with something else of the same group.
void posted_receives_need_no_attention(const Setting& setting) {
  constexpr int kMessages = 40;
  if (setting.ranks == 1) return;
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> received;
  if (rank() == 1) {
    for (int number = 0; number < kMessages; ++number) {
      received.push_back(at::zeros({3}, setting.on(at::kLong)));
      works.push_back(receive(received.back(), 0));
    }
  }
  if (rank() == 0) {
    for (int number = 0; number < kMessages; ++number)
      works.push_back(send(letter(setting, 0, 1, 0, number), 1));
    for (const auto& work : works) work->wait();
  }
  barrier();  // rank 0 comes here only when all its messages have been taken
  for (const auto& work : works) work->wait();
  for (size_t number = 0; number < received.size(); ++number)
    expect_bitwise_equal(received[number], letter(setting, 0, 1, 0, static_cast<int>(number)));
}

void messages_and_collectives_do_not_mix(const Setting& setting) {
  if (setting.ranks == 1) return;
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  for (int turn = 0; turn < 30; ++turn) {
    auto in = at::zeros({3}, setting.on(at::kLong));
    auto received = receive(in, previous, turn % 3);
    Tensors tensors{at::ones({turn * 400}, setting.on(at::kLong))};
    auto reduced = default_group()->allreduce(tensors);
    auto sent = send(letter(setting, rank(), next, turn % 3, turn), next, turn % 3);
    if (turn % 2 == 0) reduced->wait();
    received->wait();
    sent->wait();
    reduced->wait();
    expect_bitwise_equal(in, letter(setting, previous, rank(), turn % 3, turn));
    EXPECT_TRUE(tensors[0].eq(setting.ranks).all().item<bool>());
  }
}

void messages_of_any_layout(const Setting& setting) {
  if (setting.ranks == 1 || rank() > 1) return;
  const auto expected = pattern(setting, 0, 24).view({4, 6});
  if (rank() == 0) {
    send(expected.t(), 1)->wait();
    send(expected.slice(1, 0, 6, 2), 1)->wait();
    send(at::scalar_tensor(7.0, setting.on()), 1)->wait();
    send(at::empty({0, 3}, setting.on()), 1)->wait();
    send(expected.clone().set_requires_grad(true), 1)->wait();
    send(at::ones({1}, setting.on()).expand({5}), 1)->wait();
    return;
  }
  auto transposed = at::zeros({4, 6}, setting.on()).t();
  receive(transposed, 0)->wait();
  expect_bitwise_equal(transposed.contiguous(), expected.t().contiguous());
  auto wide = at::zeros({4, 6}, setting.on());
  receive(wide.slice(1, 1, 6, 2), 0)->wait();
  expect_bitwise_equal(wide.slice(1, 1, 6, 2).contiguous(),
                       expected.slice(1, 0, 6, 2).contiguous());
  EXPECT_TRUE(wide.slice(1, 0, 6, 2).eq(0).all().item<bool>()) << "what lies between stays";
  auto scalar = at::scalar_tensor(0.0, setting.on());
  receive(scalar, 0)->wait();
  EXPECT_EQ(scalar.item<float>(), 7);
  auto nothing = at::empty({0, 3}, setting.on());
  receive(nothing, 0)->wait();
  auto leaf = at::zeros({8, 6}, setting.on()).slice(0, 0, 8, 2).detach().set_requires_grad(true);
  receive(leaf, 0)->wait();
  expect_bitwise_equal(leaf.detach().contiguous(), expected);
  auto shared = at::zeros({1}, setting.on()).expand({5});
  EXPECT_NE(message_of<c10::ValueError>([&] { receive(shared, 0); }).find("share memory"),
            std::string::npos);
  auto five = at::zeros({5}, setting.on());
  receive(five, 0)->wait();
  EXPECT_TRUE(five.eq(1).all().item<bool>());
}

void messages_end_through_futures_and_polling(const Setting& setting) {
  if (setting.ranks == 1) return;
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  auto first = at::zeros({3}, setting.on(at::kLong));
  auto second = at::zeros({3}, setting.on(at::kLong));
  auto polled = receive(first, previous, 1);
  auto future = receive(second, previous, 2)->getFuture();
  auto sent = send(letter(setting, rank(), next, 1, 0), next, 1)->getFuture();
  auto chained =
      future->then([](c10::ivalue::Future& done) { return done.value().toTensorVector()[0] + 1; },
                   c10::TensorType::get());
  send(letter(setting, rank(), next, 2, 0), next, 2)->wait();
  sent->waitAndThrow();
  while (!polled->isCompleted()) std::this_thread::yield();
  EXPECT_TRUE(polled->isSuccess());
  expect_bitwise_equal(first, letter(setting, previous, rank(), 1, 0));
  chained->waitAndThrow();
  expect_bitwise_equal(chained->value().toTensor(), letter(setting, previous, rank(), 2, 0) + 1);
}

void coalesced_messages_end_together(const Setting& setting) {
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  if (setting.ranks == 1) return;
  Tensors sum{at::ones({2}, setting.on(at::kLong))};
  auto small = at::zeros({3}, setting.on(at::kLong));
  auto large = at::zeros({100'000}, setting.on(at::kLong));
  default_group()->startCoalescing(setting.device.type());
  send(letter(setting, rank(), next, 0, 1), next);
  receive(small, previous);
  default_group()->allreduce(sum);
  send(letter(setting, rank(), next, 0, 2, 100'000), next);
  receive(large, previous);
  default_group()->endCoalescing(setting.device.type())->wait();
  expect_bitwise_equal(small, letter(setting, previous, rank(), 0, 1));
  expect_bitwise_equal(large, letter(setting, previous, rank(), 0, 2, 100'000));
  EXPECT_TRUE(sum[0].eq(setting.ranks).all().item<bool>());
}

}  // namespace

const std::vector<Body>& point_bodies() {
  static const std::vector<Body> kBodies = {
      {"SendsEveryDtype", sends_every_dtype},
      {"MessagesInTurns", messages_in_turns},
      {"KeepsTheOrderWithinATag", keeps_the_order_within_a_tag},
      {"WaitsForMessagesInAnyOrder", waits_in_any_order},
      {"TakesTagsInAnotherOrderThanSent", takes_tags_in_another_order_than_sent},
      {"CrossingLargeMessagesDoNotBlock", crossing_large_messages_do_not_block},
      {"ReceivesFromAnySource", receives_from_any_source},
      {"PostedReceivesNeedNoAttention", posted_receives_need_no_attention},
      {"MessagesAndCollectivesDoNotMix", messages_and_collectives_do_not_mix},
      {"MessagesOfAnyLayout", messages_of_any_layout},
      {"MessagesEndThroughFuturesAndPolling", messages_end_through_futures_and_polling},
      {"CoalescedMessagesEndTogether", coalesced_messages_end_together},
  };
  return kBodies;
}

}  // namespace tessera::collective_bodies
