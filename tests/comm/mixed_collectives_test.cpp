// Thousands of collectives of every kind under way at once, in several groups, waited for in any
// order.
#include "comm/collective_bodies.h"
#include "support/random.h"
#include "support/ranks.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <numeric>
#include <random>
#include <thread>

namespace tessera::collective_bodies {
namespace {

/// A collective under way: what to wait for and how to see that it did the right thing.
struct Flight {
  WorkPtr work;
  std::function<bool()> is_right;
  std::string what;
};

/// Element i of what `member` of a group contributes to collective `number`.
at::Tensor contribution(int member, int number, int64_t count, c10::Device device) {
  return at::arange(count, at::TensorOptions(device).dtype(at::kLong)).remainder(7) +
         (member + 1) * (number % 13 + 1);
}

/// Where collectives of one group take their tensors from, and what they are.
struct Terrain {
  std::vector<Group> groups;
  std::vector<c10::Device> devices = {c10::DeviceType::CPU};
  bool has_messages = true;
};

class Traffic {
 public:
  Traffic(Terrain terrain, uint64_t seed)
      : groups_(std::move(terrain.groups)),
        devices_(std::move(terrain.devices)),
        kinds_(terrain.has_messages ? kKinds : kKinds - 1),
        shared_(seed),
        own_(seed + 1 + rank()) {}

  /// Issues `total` collectives, the same on every rank, and waits for them in an order of its own.
  void run(int total) {
    for (int number = 0; number < total && !::testing::Test::HasFailure(); ++number) {
      const auto which = shared_() % groups_.size();
      const auto kind = shared_() % kinds_;
      const int64_t count = shared_() % 50 == 0 ? shared_() % 90'000 : shared_() % 200;
      const auto root = shared_();
      const auto device =
          devices_.size() == 1 ? devices_[0] : devices_[shared_() % devices_.size()];
      if (!groups_[which]) continue;  // of others
      issue(groups_[which], static_cast<int>(kind), number, count, root, device);
      while (flights_.size() > kMost) wait_for_any();
      if (own_() % 4 == 0 && !flights_.empty()) wait_for_any();
    }
    while (!flights_.empty()) wait_for_any();
  }

 private:
  static constexpr uint64_t kKinds = 11;
  static constexpr size_t kMost = 100;

  /// In shared memory every third time, as this rank draws it.
  at::Tensor fill(const at::Tensor& values) {
    if (!values.is_cpu() || own_() % 3 != 0) return values.clone();
    return empty_shared(values.sizes(), values.options()).copy_(values);
  }

  void wait_for_any() {
    const auto index = own_() % flights_.size();
    std::swap(flights_[index], flights_.back());
    const auto flight = std::move(flights_.back());
    flights_.pop_back();
    switch (own_() % 8) {
      case 0:
        flight.work->getFuture()->waitAndThrow();
        break;
      case 1:
        while (!flight.work->isCompleted()) std::this_thread::yield();
        break;
      default:
        flight.work->wait();
    }
    EXPECT_TRUE(flight.is_right()) << flight.what;
  }

  void add(WorkPtr work, std::function<bool()> is_right) {
    flights_.push_back({.work = std::move(work), .is_right = std::move(is_right), .what = what_});
  }

  void issue(const Group& group, int kind, int number, int64_t count, uint64_t draw,
             c10::Device device) {
    const int n = group->getSize();
    const int me = group->getRank();
    const int root = static_cast<int>(draw % n);
    what_ = c10::str("#", number, " of kind ", kind, ", ", count, " elements, root ", root,
                     ", group ", group->getGroupName(), ", on ", device);
    const auto own = contribution(me, number, count, device);
    switch (kind) {
      case 0:
      case 1:
      case 2:
        return all_reduce(group, number, own, kind == 2);
      case 3:
        return broadcast(group, number, own, root);
      case 4:
        return reduce(group, number, own, root);
      case 5:
        return all_gather(group, number, own);
      case 6:
        return reduce_scatter(group, number, own);
      case 7:
        return exchange(group, number, own);
      case 8:
        return gather(group, number, own, root);
      case 9:
        return add(group->barrier(), [] { return true; });
      default:
        return message(group, number, own);
    }
  }

  static at::Tensor sum(const Group& group, int number, const at::Tensor& own) {
    const int64_t n = group->getSize();
    return of(0, number, own) * n + n * (n - 1) / 2 * (number % 13 + 1);
  }
  /// What `member` contributes where this rank contributes `own`.
  static at::Tensor of(int member, int number, const at::Tensor& own) {
    return contribution(member, number, own.numel(), own.device());
  }

  void all_reduce(const Group& group, int number, const at::Tensor& own, bool coalesced) {
    Tensors tensors{fill(own)};
    if (coalesced) tensors.push_back(fill(own));
    auto work = coalesced ? group->allreduce_coalesced(tensors) : group->allreduce(tensors);
    add(work, [=] {
      const auto expected = sum(group, number, own);
      return tensors[0].equal(expected) && tensors.back().equal(expected);
    });
  }
  void broadcast(const Group& group, int number, const at::Tensor& own, int root) {
    Tensors tensors{fill(own)};
    add(group->broadcast(tensors, {.rootRank = root}),
        [=] { return tensors[0].equal(of(root, number, own)); });
  }
  void reduce(const Group& group, int number, const at::Tensor& own, int root) {
    Tensors tensors{fill(own)};
    add(group->reduce(tensors, {.rootRank = root}),
        [=] { return tensors[0].equal(group->getRank() == root ? sum(group, number, own) : own); });
  }
  void all_gather(const Group& group, int number, const at::Tensor& own) {
    auto input = fill(own);
    auto whole = at::zeros({group->getSize(), own.numel()}, own.options());
    add(group->getBackend(own.device().type())->_allgather_base(whole, input, {}), [=] {
      bool right = true;
      for (int member = 0; member < group->getSize(); ++member)
        right = right && whole[member].equal(of(member, number, own));
      return right;
    });
  }
  void reduce_scatter(const Group& group, int number, const at::Tensor& own) {
    auto input = fill(own.expand({group->getSize(), own.numel()}));
    auto output = at::zeros_like(own);
    add(group->getBackend(own.device().type())->_reduce_scatter_base(output, input, {}),
        [=] { return output.equal(sum(group, number, own)); });
  }
  void exchange(const Group& group, int number, const at::Tensor& own) {
    auto input = fill(own.expand({group->getSize(), own.numel()}));
    auto output = at::zeros_like(input);
    std::vector<int64_t> none;
    add(group->getBackend(own.device().type())->alltoall_base(output, input, none, none, {}), [=] {
      bool right = true;
      for (int member = 0; member < group->getSize(); ++member)
        right = right && output[member].equal(of(member, number, own));
      return right;
    });
  }
  void gather(const Group& group, int number, const at::Tensor& own, int root) {
    Tensors input{fill(own)};
    TensorLists lists;
    if (group->getRank() == root)
      lists.push_back(at::zeros({group->getSize(), own.numel()}, own.options()).unbind());
    add(group->gather(lists, input, {.rootRank = root}), [=] {
      bool right = true;
      for (size_t member = 0; !lists.empty() && member < lists[0].size(); ++member) {
        const auto theirs = of(static_cast<int>(member), number, own);
        right = right && lists[0][member].equal(theirs);
      }
      return right;
    });
  }
  /// To the next member and from the previous one.
  void message(const Group& group, int number, const at::Tensor& own) {
    const int n = group->getSize();
    if (n == 1) return;
    const int previous = (group->getRank() + n - 1) % n;
    Tensors in{at::zeros_like(own)};
    Tensors out{fill(own)};
    add(group->recv(in, previous, number % 5),
        [=] { return in[0].equal(of(previous, number, own)); });
    add(group->send(out, (group->getRank() + 1) % n, number % 5), [=] { return !out.empty(); });
  }

  const std::vector<Group> groups_;
  const std::vector<c10::Device> devices_;
  const uint64_t kinds_;
  std::mt19937_64 shared_;  // drawn alike on every rank
  std::mt19937_64 own_;
  std::vector<Flight> flights_;
  std::string what_;
};

/// The world, the world backwards, the even ranks and neighbours that overlap.
std::vector<Group> overlapping_groups() {
  const int n = world_size();
  std::vector<std::vector<int>> lists(4);
  for (int rank = 0; rank < n; ++rank) {
    lists[0].push_back(n - 1 - rank);
    lists[rank % 2 == 0 ? 1 : 2].push_back(rank);
    if (rank < 2) lists[3].push_back(rank);
  }
  for (int rank = 1; rank + 1 < n; ++rank) lists.push_back({rank, rank + 1});
  std::vector<Group> groups{default_group()};
  for (const auto& list : lists) {
    const bool is_member = std::find(list.begin(), list.end(), rank()) != list.end();
    groups.push_back(is_member ? new_group(list) : Group());
  }
  return groups;
}

void run_traffic(int total) {
  Traffic({.groups = overlapping_groups()}, testing::test_seed()).run(total);
  barrier();
  EXPECT_GT(backend()->getSequenceNumberForGroup(), static_cast<uint64_t>(total) / 20);
}

constexpr std::chrono::seconds kTrafficTimeout{30};

class MixedCollectivesOnThreads : public ::testing::TestWithParam<int> {};
TEST_P(MixedCollectivesOnThreads, KeepTheirResultsApart) {
  testing::run_threads(GetParam(), [] { run_traffic(10'000); },
                       {.backend = "shm", .timeout = kTrafficTimeout});
}
INSTANTIATE_TEST_SUITE_P(Ranks, MixedCollectivesOnThreads, ::testing::Values(2, 4, 8),
                         ::testing::PrintToStringParamName());

class MixedCollectivesOnProcesses : public ::testing::TestWithParam<int> {};
TEST_P(MixedCollectivesOnProcesses, KeepTheirResultsApart) {
  testing::run_processes(GetParam(), [] { run_traffic(10'000); },
                         {.backend = "shm", .timeout = kTrafficTimeout});
}
INSTANTIATE_TEST_SUITE_P(Ranks, MixedCollectivesOnProcesses, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

TEST(MixedGlooCollectivesOnThreads, KeepTheirResultsApart) {
  testing::run_threads(3, [] { run_traffic(1'000); },
                       {.backend = "gloo", .timeout = kTrafficTimeout});
}

class MixedCollectivesOnCuda : public ::testing::TestWithParam<testing::DeviceCase> {};
/// CPU and CUDA tensors in turn, in every group.
TEST_P(MixedCollectivesOnCuda, KeepTheirResultsApart) {
  const auto body = [] {
    Traffic({.groups = overlapping_groups(), .devices = {at::kCPU, testing::run_device()}},
            testing::test_seed())
        .run(1'000);
    barrier();
  };
  testing::run_on(GetParam(), body, {.timeout = kTrafficTimeout});
}
INSTANTIATE_TEST_SUITE_P(Every, MixedCollectivesOnCuda,
                         ::testing::ValuesIn(testing::cuda_cases({"shm", "gloo"})),
                         testing::case_name);

/// Communicators of NCCL that run at once may wait for each other; one does not.
class MixedNcclCollectivesOnCuda : public ::testing::TestWithParam<testing::DeviceCase> {};
TEST_P(MixedNcclCollectivesOnCuda, KeepTheirResultsApart) {
  const auto body = [] {
    Traffic(
        {.groups = {default_group()}, .devices = {testing::run_device()}, .has_messages = false},
        testing::test_seed())
        .run(400);
    barrier();
  };
  testing::run_on(GetParam(), body, {.timeout = kTrafficTimeout});
}
INSTANTIATE_TEST_SUITE_P(Every, MixedNcclCollectivesOnCuda,
                         ::testing::ValuesIn(testing::cuda_cases({"nccl"})), testing::case_name);

}  // namespace
}  // namespace tessera::collective_bodies
