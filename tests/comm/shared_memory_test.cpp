// Tensors that live in shared memory: collectives on them, where the memory comes from and where it
// goes.
#include "comm/shm/shared_memory.h"

#include "comm/collective_bodies.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

namespace tessera {
namespace {

using collective_bodies::backend;
using collective_bodies::message_of;
using collective_bodies::pattern;
using collective_bodies::pattern_from;
using collective_bodies::TensorLists;
using collective_bodies::Tensors;
using comm::shm::Arena;
using ::testing::AllOf;
using testing::expect_bitwise_equal;
using ::testing::HasSubstr;
using testing::run_processes;
using testing::run_threads;

bool is_shared(const at::Tensor& tensor) {
  return Arena::own()->offset_of(tensor.const_data_ptr(), tensor.nbytes()).has_value();
}

/// How a rank keeps its tensor: on the heap, in shared memory, or as a view into a larger one
/// there.
enum class Keep { Heap, Shared, View };

at::Tensor keep(Keep how, const at::Tensor& values) {
  if (how == Keep::Heap) return values.clone();
  if (how == Keep::Shared) return empty_shared(values.sizes(), values.options()).copy_(values);
  auto whole = empty_shared({values.numel() + 21}, values.options());
  return whole.narrow(0, 5, values.numel()).view(values.sizes()).copy_(values);
}

at::Tensor sum_of_patterns(int64_t count, int64_t begin = 0) {
  auto total = at::zeros({count});
  for (int peer = 0; peer < world_size(); ++peer) total += pattern_from(peer, begin, count);
  return total;
}

void reduce_tensors(Keep how, int64_t count) {
  const int n = world_size();
  const int root = static_cast<int>(count % n);
  Tensors tensors{keep(how, pattern(rank(), count))};
  default_group()->allreduce(tensors)->wait();
  expect_bitwise_equal(tensors[0], sum_of_patterns(count), "all_reduce");
  tensors[0].zero_();  // may be written at once: nobody reads it any more

  Tensors rooted{keep(how, pattern(rank(), count))};
  default_group()->reduce(rooted, {.rootRank = root})->wait();
  expect_bitwise_equal(rooted[0], rank() == root ? sum_of_patterns(count) : pattern(rank(), count),
                       "reduce");
  rooted[0].zero_();

  auto whole = keep(how, pattern(rank(), n * count));
  auto part = keep(how, at::zeros({count}));
  backend()->_reduce_scatter_base(part, whole, {})->wait();
  whole.zero_();
  expect_bitwise_equal(part, sum_of_patterns(count, rank() * count), "reduce_scatter_tensor");
}

void move_tensors(Keep how, int64_t count) {
  const int n = world_size();
  const int root = static_cast<int>(count % n);
  Tensors tensors{keep(how, pattern(rank(), count))};
  default_group()->broadcast(tensors, {.rootRank = root})->wait();
  expect_bitwise_equal(tensors[0], pattern(root, count), "broadcast");
  tensors[0].zero_();

  auto input = keep(how, pattern(rank(), count));
  auto whole = keep(how, at::zeros({n, count}));
  backend()->_allgather_base(whole, input, {})->wait();
  TensorLists lists;
  if (rank() == root) lists.push_back(keep(how, at::zeros({n, count})).unbind());
  Tensors one{input};
  default_group()->gather(lists, one, {.rootRank = root})->wait();
  input.zero_();
  for (int peer = 0; peer < n; ++peer) {
    expect_bitwise_equal(whole[peer], pattern(peer, count), "all_gather_into_tensor");
    if (rank() == root) expect_bitwise_equal(lists[0][peer], pattern(peer, count), "gather");
  }
  Tensors output{keep(how, at::zeros({count}))};
  default_group()->scatter(output, lists, {.rootRank = root})->wait();
  expect_bitwise_equal(output[0], pattern(rank(), count), "scatter");

  auto rows = keep(how, pattern(rank(), n * count));
  auto exchanged = keep(how, at::zeros({n * count}));
  std::vector<int64_t> none;
  backend()->alltoall_base(exchanged, rows, none, none, {})->wait();
  rows.zero_();
  for (int peer = 0; peer < n; ++peer) {
    expect_bitwise_equal(exchanged.narrow(0, peer * count, count),
                         pattern_from(peer, rank() * count, count), "all_to_all");
  }
}

void send_tensors(Keep how, int64_t count) {
  const int n = world_size();
  Tensors out{keep(how, pattern(rank(), count))};
  Tensors in{keep(how, at::zeros({count}))};
  auto sent = default_group()->send(out, (rank() + 1) % n, 4);
  default_group()->recv(in, (rank() + n - 1) % n, 4)->wait();
  sent->wait();
  out[0].zero_();
  expect_bitwise_equal(in[0], pattern((rank() + n - 1) % n, count), "send and recv");
}

/// All ranks alike, then each rank another way, in every rotation.
void run_collectives_on_shared_tensors() {
  for (const int64_t count :
       {int64_t{1}, int64_t{1000}, int64_t{70'001}, 1'200'003 / int64_t{world_size()}}) {
    for (int mix = 0; mix < 5; ++mix) {
      const auto how = mix == 0   ? Keep::Shared
                       : mix == 1 ? Keep::View
                                  : static_cast<Keep>((rank() + mix) % 3);
      SCOPED_TRACE(c10::str(count, " elements, mix ", mix));
      reduce_tensors(how, count);
      move_tensors(how, count);
      if (world_size() > 1) send_tensors(how, count);
    }
  }
}

class SharedTensorsOnThreads : public ::testing::TestWithParam<int> {};
TEST_P(SharedTensorsOnThreads, GiveTheResultsOfOthers) {
  run_threads(GetParam(), run_collectives_on_shared_tensors, {.backend = "shm"});
}
INSTANTIATE_TEST_SUITE_P(Ranks, SharedTensorsOnThreads, ::testing::Values(1, 2, 3, 4, 8),
                         ::testing::PrintToStringParamName());

class SharedTensorsOnProcesses : public ::testing::TestWithParam<int> {};
TEST_P(SharedTensorsOnProcesses, GiveTheResultsOfOthers) {
  run_processes(GetParam(), run_collectives_on_shared_tensors, {.backend = "shm"});
}
INSTANTIATE_TEST_SUITE_P(Ranks, SharedTensorsOnProcesses, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

TEST(EmptySharedOnThreads, MakesTensorsLikeAnyOther) {
  run_threads(1,
              [] {
                const auto tensor =
                    empty_shared({2, 3}, at::TensorOptions(at::kHalf).requires_grad(true));
                EXPECT_EQ(tensor.sizes(), at::IntArrayRef({2, 3}));
                EXPECT_EQ(tensor.scalar_type(), at::kHalf);
                EXPECT_TRUE(tensor.requires_grad() && tensor.is_leaf() && tensor.is_contiguous());
                EXPECT_TRUE(is_shared(tensor));
                EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64, 0);
                EXPECT_EQ(empty_shared({0, 3}).numel(), 0);
                EXPECT_EQ(empty_shared({}).dim(), 0);
                EXPECT_TRUE(is_shared(empty_shared({4}).slice(0, 1, 3)));
                EXPECT_FALSE(is_shared(empty_shared({4}).clone()));
              },
              {.backend = "shm"});
}

TEST(EmptySharedOnThreads, IsAnOrdinaryTensorInOtherGroups) {
  run_threads(2, [] { EXPECT_FALSE(is_shared(empty_shared({4}))); }, {.backend = "gloo"});
  const auto world = testing::fake_world(0, 8);
  EXPECT_FALSE(is_shared(empty_shared({4})));
}

TEST(EmptySharedErrorOnThreads, RefusesWhatIsNoDenseCpuTensor) {
  run_threads(1,
              [] {
                EXPECT_THAT(message_of<c10::ValueError>([] { empty_shared({2}, at::kCUDA); }),
                            HasSubstr("expected a CPU tensor, got device cuda"));
                EXPECT_THAT(message_of<c10::ValueError>([] { empty_shared({2}, at::kSparse); }),
                            HasSubstr("dense"));
                EXPECT_THAT(message_of<c10::ValueError>([] { empty_shared({2, -1}); }),
                            HasSubstr("[2, -1]"));
              },
              {.backend = "shm"});
}

TEST(EmptySharedErrorOnThreads, SaysThatMemoryIsMissingInsteadOfDying) {
  run_threads(
      1,
      [] {
        const auto before = Arena::own()->allocated_bytes();
        const int64_t all = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
        // More than the machine has, more than a size can say, and nearly all of the machine.
        for (const int64_t count :
             {int64_t{1} << 45, (int64_t{1} << 60) - 1, (int64_t{1} << 61) - 1}) {
          EXPECT_THAT(
              message_of<c10::OutOfMemoryError>([&] { empty_shared({count}, at::kDouble); }),
              AllOf(HasSubstr("empty_shared"), HasSubstr("use smaller")))
              << count;
        }
        EXPECT_THAT(message_of<c10::OutOfMemoryError>(
                        [&] { empty_shared({all - (int64_t{16} << 20)}, at::kByte); }),
                    HasSubstr("of shared memory"));
        EXPECT_THAT(
            message_of<c10::ValueError>([] { empty_shared({int64_t{1} << 40, int64_t{1} << 40}); }),
            HasSubstr("larger than memory"));
        EXPECT_EQ(Arena::own()->allocated_bytes(), before);
        empty_shared({1000}).fill_(1);  // the arena still works
      },
      {.backend = "shm"});
}

TEST(SharedMemoryOnThreads, IsGivenBack) {
  run_threads(1, [] {}, {.backend = "shm"});  // what a first world leaves for good is not a leak
  const auto before = Arena::own()->allocated_bytes();
  run_threads(3,
              [] {
                const auto during = Arena::own()->allocated_bytes();
                {
                  const auto tensor = empty_shared({1'000'000});
                  EXPECT_GE(Arena::own()->allocated_bytes(), during - during / 2);
                  const auto group = new_group({0, 1, 2});
                  Tensors one{tensor};
                  group->allreduce(one)->wait();
                }
                Tensors out{at::ones({5000})};
                default_group()->send(out, (rank() + 1) % 3, 0)->wait();  // nobody fetches it
                auto in = at::zeros({7});
                Tensors never{in};
                const auto work =
                    default_group()->recv(never, (rank() + 1) % 3, 9);  // nothing comes
                barrier();
              },
              {.backend = "shm"});
  EXPECT_EQ(Arena::own()->allocated_bytes(), before);
}

TEST(SharedMemoryOnThreads, IsGivenBackByGroupsThatFailed) {
  run_threads(1, [] {}, {.backend = "shm"});
  const auto before = Arena::own()->allocated_bytes();
  run_threads(3,
              [] {
                auto tensor = empty_shared({10 + rank()});  // the ranks disagree on the size
                Tensors one{tensor};
                const auto work = default_group()->allreduce(one);
                EXPECT_THROW(work->wait(), c10::DistBackendError);
              },
              {.backend = "shm"});
  EXPECT_EQ(Arena::own()->allocated_bytes(), before);
}

TEST(SharedMemoryOnThreads, OutlivesItsWorld) {
  at::Tensor tensor;
  run_threads(1, [&] { tensor = empty_shared({1000}).fill_(3); }, {.backend = "shm"});
  EXPECT_TRUE(tensor.eq(3).all().item<bool>());
}

TEST(SharedMemory, NeedsNoSpaceInDevShm) {
  const auto path = c10::str("/proc/self/fd/", Arena::own()->descriptor());
  EXPECT_THAT(std::filesystem::read_symlink(path).string(), HasSubstr("memfd:"));
}

TEST(Arena, GivesEveryPieceToOneOwnerAndJoinsWhatIsFree) {
  const auto arena = Arena::own();
  const auto before = arena->allocated_bytes();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&arena, thread] {
      std::vector<std::pair<size_t, size_t>> pieces;
      for (int i = 0; i < 400; ++i) {
        const size_t bytes = 1 + (i * 7919 + thread * 104'729) % 40'000;
        const auto offset = arena->allocate(bytes, "test");
        std::memset(arena->base() + offset, thread + 1, bytes);
        pieces.emplace_back(offset, bytes);
        if (i % 3 != 2) continue;
        const auto [from, size] = pieces[i / 2 % pieces.size()];
        const auto* begin = arena->base() + from;
        EXPECT_TRUE(
            std::all_of(begin, begin + size, [&](uint8_t byte) { return byte == thread + 1; }));
        arena->release(from);
        pieces.erase(pieces.begin() + i / 2 % static_cast<int>(pieces.size()));
      }
      for (const auto& [offset, bytes] : pieces) arena->release(offset);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(arena->allocated_bytes(), before);
  // Joined again: a piece as large as all of them fits where they were.
  const auto first = arena->allocate(1, "test");
  const auto large = arena->allocate(size_t{16} << 20, "test");
  EXPECT_LT(large, before + (size_t{64} << 20));
  arena->release(first);
  arena->release(large);
}

}  // namespace
}  // namespace tessera
