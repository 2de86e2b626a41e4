// How a caller learns that a collective is complete, and collectives that belong together.
#include "comm/collective_bodies.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <thread>

namespace tessera::collective_bodies {
namespace {

using c10d::ReduceOp;
using testing::expect_bitwise_equal;

// One that is complete after a single round and one that needs several.
constexpr int64_t kShortAndLong[] = {10, 500'000};

int64_t total(const Setting& setting) { return setting.is_fake() ? 1 : setting.ranks; }

void completes_by_wait_future_and_polling(const Setting& setting) {
  for (const int64_t count : kShortAndLong) {
    SCOPED_TRACE(c10::str(count, " elements"));
    std::vector<Tensors> tensors;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 5; ++i) {
      tensors.push_back({at::ones({count}, setting.on(at::kLong))});
      works.push_back(default_group()->allreduce(tensors.back()));
    }
    const auto is_right = [&](const at::Tensor& tensor) {
      return tensor.eq(total(setting)).all().item<bool>();
    };
    auto chained = works[4]->getFuture()->then(
        [&](c10::ivalue::Future& done) {
          return c10::IValue(is_right(done.value().toTensorVector()[0]));
        },
        c10::BoolType::get());
    while (!works[3]->isCompleted()) std::this_thread::yield();
    EXPECT_TRUE(is_right(tensors[3][0]));
    works[2]->getFuture()->waitAndThrow();
    EXPECT_TRUE(is_right(works[2]->getFuture()->value().toTensorVector()[0]));
    EXPECT_TRUE(works[1]->wait());
    EXPECT_TRUE(is_right(tensors[1][0]));
    EXPECT_TRUE(works[0]->wait(std::chrono::seconds(15)));
    works[0]->synchronize();  // a matter of streams; nothing to do on a CPU
    EXPECT_TRUE(is_right(tensors[0][0]));
    chained->waitAndThrow();
    EXPECT_TRUE(chained->value().toBool()) << "the callback ran before the result was there";
    for (const auto& work : works) {
      EXPECT_TRUE(work->isCompleted());
      EXPECT_TRUE(work->isSuccess());
      EXPECT_EQ(work->exception(), nullptr);
      EXPECT_TRUE(work->wait()) << "a second wait";
      EXPECT_GE(work->getDuration(), 0);
      work->getFutureResult()->waitAndThrow();
      EXPECT_EQ(work->getFutureResult()->value().toInt(),
                static_cast<int64_t>(c10d::WorkResult::SUCCESS));
    }
    EXPECT_LT(works[0]->getSequencenumber(), works[4]->getSequencenumber());
    EXPECT_TRUE(works[0]->result()[0].is_same(tensors[0][0]));
  }
}

/// Not at the next collective: memory of a whole layer would stay until then.
void lets_go_of_tensors_when_complete(const Setting& setting) {
  for (const int64_t count : kShortAndLong) {
    SCOPED_TRACE(c10::str(count, " elements"));
    std::vector<std::weak_ptr<int>> memories;
    const auto make = [&](int64_t numel) {
      auto alive = std::make_shared<int>();
      memories.push_back(alive);
      const auto memory = at::ones({numel}, setting.on());
      return at::from_blob(memory.data_ptr(), {numel}, [memory, alive](void*) {}, setting.on());
    };
    {
      const auto backend = default_group()->getBackend(setting.device.type());
      Tensors reduced{make(count)};
      default_group()->allreduce(reduced)->wait();
      auto output = make(setting.ranks * count);
      auto input = make(count);
      backend->_allgather_base(output, input, {})->wait();
      backend->_reduce_scatter_base(input, output, {})->wait();
    }
    const auto is_held = [&] {
      return std::ranges::any_of(memories, [](const auto& memory) { return !memory.expired(); });
    };
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (is_held() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_FALSE(is_held());
  }
}

void callbacks_may_issue_further_collectives(const Setting& setting) {
  for (const int64_t count : kShortAndLong) {
    Tensors first{at::ones({count}, setting.on(at::kLong))};
    Tensors second{at::ones({count}, setting.on(at::kLong))};
    const auto group = default_group();
    WorkPtr follower;
    auto work = group->allreduce(first);
    auto chained = work->getFuture()->then(
        [&](c10::ivalue::Future&) {
          follower = group->allreduce(second);
          return c10::IValue(true);
        },
        c10::BoolType::get());
    chained->waitAndThrow();
    follower->wait();
    EXPECT_TRUE(first[0].eq(total(setting)).all().item<bool>());
    EXPECT_TRUE(second[0].eq(total(setting)).all().item<bool>());
  }
}

void callbacks_may_send_and_receive(const Setting& setting) {
  if (setting.ranks == 1) return;
  const auto group = default_group();
  const int next = (rank() + 1) % setting.ranks;
  const int previous = (rank() + setting.ranks - 1) % setting.ranks;
  Tensors in{at::zeros({2}, setting.on(at::kLong))};
  Tensors back{at::zeros({2}, setting.on(at::kLong))};
  WorkPtr reply;
  auto received = group->recv(in, previous, 0);
  auto passed_on = received->getFuture()->then(
      [&](c10::ivalue::Future& done) {
        Tensors out{done.value().toTensorVector()[0] + 1};
        reply = group->send(out, previous, 1);
        return c10::IValue(true);
      },
      c10::BoolType::get());
  Tensors out{at::full({2}, rank(), setting.on(at::kLong))};
  group->send(out, next, 0)->wait();
  group->recv(back, next, 1)->wait();
  EXPECT_TRUE(back[0].eq(rank() + 1).all().item<bool>()) << back[0];
  passed_on->waitAndThrow();
  reply->wait();
}

void waits_for_collectives_in_any_order(const Setting& setting) {
  std::vector<Tensors> tensors;
  std::vector<WorkPtr> works;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back({at::full({i % 7 == 3 ? 100'000 : i + 1}, i + 1, setting.on(at::kLong))});
    works.push_back(i % 5 == 4 ? default_group()->broadcast(tensors[i], {.rootRank = 0})
                               : default_group()->allreduce(tensors[i]));
  }
  // Another order on every rank; 13 and 40 have no common divisor.
  for (int i = 0; i < 40; ++i) {
    const int which = (i * (rank() % 2 == 0 ? 13 : 27) + rank()) % 40;
    works[which]->wait();
    const int64_t expected = (which + 1) * (which % 5 == 4 ? 1 : total(setting));
    EXPECT_TRUE(tensors[which][0].eq(expected).all().item<bool>()) << which;
  }
}

void collectives_nobody_waits_for_still_take_part(const Setting& setting) {
  for (int turn = 0; turn < 30; ++turn) {
    Tensors dropped{at::ones({turn % 3 == 0 ? 100'000 : 4}, setting.on())};
    default_group()->allreduce(dropped);  // the work dies at once; rank 0 does wait
    Tensors kept{at::ones({4}, setting.on())};
    auto work = default_group()->allreduce(kept);
    if (turn % 4 == rank() % 4) work->wait();
  }
  Tensors last{at::ones({4}, setting.on())};
  default_group()->allreduce(last)->wait();
  EXPECT_TRUE(last[0].eq(total(setting)).all().item<bool>());
}

void complete_on_return_if_not_asynchronous(const Setting& setting) {
  for (const int64_t count : kShortAndLong) {
    Tensors tensors{at::ones({count}, setting.on())};
    auto work = default_group()->allreduce(
        tensors,
        {.reduceOp = ReduceOp::SUM, .timeout = std::chrono::seconds(50), .asyncOp = false});
    if (work) work->wait();  // gloo leaves it to the caller
    EXPECT_TRUE(tensors[0].eq(total(setting)).all().item<bool>());
  }
}

void coalesces_by_list(const Setting& setting) {
  const int64_t n = setting.ranks;
  Tensors inputs;
  Tensors outputs;
  Tensors parts;
  for (int i = 0; i < 6; ++i) {
    const auto dtype = i % 2 == 0 ? at::kHalf : at::kLong;
    const int64_t count = i == 5 ? 90'000 : i;  // the first is empty
    inputs.push_back(sample(setting, rank(), {count, 2}, dtype, i));
    outputs.push_back(at::zeros({n * count, 2}, setting.on(dtype)));
    parts.push_back(at::zeros({count, 2}, setting.on(dtype)));
  }
  backend(setting)->allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
  for (int i = 0; i < 6; ++i)
    expect_bitwise_equal(outputs[i],
                         at::cat(samples(setting, inputs[i].sizes(), inputs[i].scalar_type(), i)));

  // All ranks hold the same now: each part comes back `ranks` times as large.
  backend(setting)->reduce_scatter_tensor_coalesced(parts, outputs, {})->wait();
  for (int i = 0; i < 6; ++i) {
    const Tensors same(total(setting), inputs[i]);
    expect_reduced(setting, parts[i], reduced(setting, same, ReduceOp::SUM));
  }
}

void gathers_several_lists_at_once(const Setting& setting) {
  Tensors inputs{pattern(setting, rank(), 5), pattern(setting, rank() + 1, 70'000)};
  TensorLists outputs(setting.ranks);  // by rank, then by input
  for (auto& list : outputs)
    list = {at::zeros({5}, setting.on()), at::zeros({70'000}, setting.on())};
  default_group()->allgather_coalesced(outputs, inputs)->wait();
  for (int peer = 0; peer < setting.ranks; ++peer) {
    expect_bitwise_equal(outputs[peer][0], pattern(setting, peer, 5));
    expect_bitwise_equal(outputs[peer][1], pattern(setting, peer + 1, 70'000));
  }
}

void coalesces_by_scope(const Setting& setting) {
  const int64_t n = setting.ranks;
  for (int turn = 0; turn < 3; ++turn) {
    Tensors sum{at::ones({turn == 1 ? 200'000 : 3}, setting.on())};
    Tensors strided{at::ones({4, 6}, setting.on()).t()};
    Tensors root{at::full({3}, rank(), setting.on())};
    auto own = at::full({3}, rank(), setting.on());
    auto whole = at::zeros({n * 3}, setting.on());
    auto part = at::zeros({3}, setting.on());
    default_group()->startCoalescing(setting.device.type());
    default_group()->allreduce(sum);
    default_group()->broadcast(root, {.rootRank = setting.ranks - 1});
    backend(setting)->_allgather_base(whole, own, {});
    default_group()->allreduce(strided);
    auto work = default_group()->endCoalescing(setting.device.type());
    turn == 2 ? work->getFuture()->waitAndThrow() : static_cast<void>(work->wait());
    EXPECT_TRUE(sum[0].eq(n).all().item<bool>());
    EXPECT_TRUE(strided[0].eq(n).all().item<bool>());
    EXPECT_TRUE(root[0].eq(n - 1).all().item<bool>());
    expect_bitwise_equal(whole, at::arange(n, setting.on()).repeat_interleave(3));
  }
  default_group()->startCoalescing(setting.device.type());
  default_group()->endCoalescing(setting.device.type())->wait();  // nothing at all
}

void several_threads_may_wait(const Setting& setting) {
  for (int turn = 0; turn < 10; ++turn) {
    Tensors tensors{at::ones({turn % 2 == 0 ? 8 : 150'000}, setting.on())};
    auto work = default_group()->allreduce(tensors);
    std::thread other([&] { work->wait(); });
    work->wait();
    EXPECT_TRUE(tensors[0].eq(total(setting)).all().item<bool>());
    other.join();
  }
}

void runs_alone_in_a_world_of_one(const Setting& setting) {
  if (setting.ranks != 1) return;
  Tensors self{at::full({3}, 2, setting.on())};
  default_group()->allreduce(self, {.reduceOp = ReduceOp::AVG})->wait();
  EXPECT_TRUE(self[0].eq(2).all().item<bool>());
  EXPECT_EQ(rank(), 0);
  EXPECT_EQ(world_size(), 1);
  barrier();
  monitored_barrier();
  EXPECT_EQ(broadcast_bytes("x"), "x");
}

}  // namespace

const std::vector<Body>& result_bodies() {
  static const std::vector<Body> kBodies = {
      {"CompletesByWaitFutureAndPolling", completes_by_wait_future_and_polling, true},
      {"LetsGoOfTensorsWhenComplete", lets_go_of_tensors_when_complete, true},
      {"CallbacksMayIssueFurtherCollectives", callbacks_may_issue_further_collectives, true},
      {"CallbacksMaySendAndReceive", callbacks_may_send_and_receive},
      {"WaitsForCollectivesInAnyOrder", waits_for_collectives_in_any_order, true},
      {"CollectivesNobodyWaitsForStillTakePart", collectives_nobody_waits_for_still_take_part,
       true},
      {"CompleteOnReturnIfNotAsynchronous", complete_on_return_if_not_asynchronous, true},
      {"CoalescesByList", coalesces_by_list, true},
      {"GathersSeveralListsAtOnce", gathers_several_lists_at_once},
      {"CoalescesByScope", coalesces_by_scope},
      {"SeveralThreadsMayWait", several_threads_may_wait, true},
      {"RunsAloneInAWorldOfOne", runs_alone_in_a_world_of_one, true},
  };
  return kBodies;
}

}  // namespace tessera::collective_bodies
