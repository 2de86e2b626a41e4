#include <tessera/corpus.h>
#include <tessera/data.h>

#include "support/device_cases.h"
#include "support/message_of.h"
#include "support/random.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <random>
#include <stdexcept>

namespace tessera::data {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::message_of;

/// Samples as their own numbers, [samples, 2], and their squares, [samples].
std::vector<at::Tensor> numbers(c10::ArrayRef<int64_t> samples) {
  const auto all = at::tensor(samples, at::kLong);
  return {at::stack({all, all + 1}, 1), all * all};
}

std::vector<int64_t> samples_of(const std::vector<at::Tensor>& batch) {
  EXPECT_EQ(batch.size(), 2);
  const auto cpu = batch[0].cpu().contiguous();
  EXPECT_TRUE(at::equal(batch[1].cpu(), cpu.select(1, 0) * cpu.select(1, 0)));
  const auto first = cpu.select(1, 0).contiguous();
  return {first.const_data_ptr<int64_t>(), first.const_data_ptr<int64_t>() + first.numel()};
}

SamplerOptions place(int rank, int world_size) {
  return {.seed = 5, .rank = rank, .world_size = world_size};
}

TEST(Loader, GivesTheSamplersOrderWithAnyThreadsAndDepth) {
  for (const int threads : {0, 1, 3}) {
    for (const int64_t prefetch : {1, 2, 7}) {
      SCOPED_TRACE(c10::str(threads, " threads, ", prefetch, " ahead"));
      Loader loader(
          23, numbers,
          {.batch_size = 4, .threads = threads, .prefetch = prefetch, .sampler = place(1, 3)});
      ShardedSampler sampler(23, place(1, 3));
      for (int i = 0; i < 30; ++i) {
        EXPECT_EQ(samples_of(loader.next()), sampler.next(4));
        EXPECT_EQ(loader.position(), sampler.position());
        EXPECT_EQ(loader.epoch(), sampler.epoch());
      }
    }
  }
}

TEST(Loader, GoesOnFromAPositionOnOtherRanks) {
  std::vector<int64_t> row;
  Loader one(50, numbers, {.batch_size = 6, .sampler = place(0, 1)});
  for (int i = 0; i < 8; ++i) {
    const auto part = samples_of(one.next());
    row.insert(row.end(), part.begin(), part.end());
  }
  Loader first(50, numbers, {.batch_size = 3, .sampler = place(0, 2)});
  Loader second(50, numbers, {.batch_size = 3, .threads = 2, .sampler = place(1, 2)});
  first.next();  // what is ahead is forgotten
  for (auto* loader : {&first, &second}) loader->seek(12);
  for (size_t at = 12; at + 6 <= row.size(); at += 6) {
    auto pair = samples_of(first.next());
    const auto other = samples_of(second.next());
    pair.insert(pair.end(), other.begin(), other.end());
    EXPECT_EQ(pair, (std::vector<int64_t>(row.begin() + static_cast<std::ptrdiff_t>(at),
                                          row.begin() + static_cast<std::ptrdiff_t>(at) + 6)));
  }
}

/// Seeks, failures and batches in any order, on threads, against the sampler.
TEST(Loader, LosesNothingInADrawnLife) {
  const auto seed = testing::test_seed();
  SCOPED_TRACE(c10::str("TESSERA_TEST_SEED=", seed));
  std::mt19937_64 random(seed);
  for (int life = 0; life < 20; ++life) {
    const auto samples = static_cast<int64_t>(random() % 90 + 1);
    std::atomic<int> failures = 0;
    const auto read = [&](c10::ArrayRef<int64_t> chosen) {
      if (failures.fetch_sub(1) > 0) throw std::runtime_error("no disk");
      return numbers(chosen);
    };
    Loader loader(samples, read,
                  {.batch_size = static_cast<int64_t>(random() % 5 + 1),
                   .threads = static_cast<int>(random() % 4),
                   .prefetch = static_cast<int64_t>(random() % 4 + 1),
                   .sampler = place(0, 2)});
    ShardedSampler sampler(samples, place(0, 2));
    const auto batch = std::ssize(samples_of(loader.next()));
    sampler.next(batch);
    for (int i = 0; i < 60; ++i) {
      if (random() % 8 == 0) {
        const auto position = static_cast<int64_t>(random() % 200);
        loader.seek(position);
        sampler.seek(position);
      }
      if (random() % 8 == 0) failures = static_cast<int>(random() % 3);
      const auto expected = sampler.next(batch);
      for (;;) {
        try {
          EXPECT_EQ(samples_of(loader.next()), expected);
          break;
        } catch (const std::runtime_error& error) {
          ASSERT_STREQ(error.what(), "no disk");
        }
      }
      ASSERT_EQ(loader.position(), sampler.position());
    }
  }
}

TEST(Loader, ReadsAheadWhileNobodyAsks) {
  std::mutex mutex;
  std::condition_variable changed;
  int reads = 0;
  const auto read = [&](c10::ArrayRef<int64_t> samples) {
    const std::lock_guard lock(mutex);
    ++reads;
    changed.notify_all();
    return numbers(samples);
  };
  Loader loader(100, read, {.batch_size = 2, .threads = 2, .prefetch = 5});
  loader.next();
  std::unique_lock lock(mutex);
  EXPECT_TRUE(changed.wait_for(lock, 60s, [&] { return reads == 6; })) << reads;
  EXPECT_FALSE(changed.wait_for(lock, 50ms, [&] { return reads > 6; })) << "one is given, 5 ahead";
}

TEST(Loader, CountsWhatNextHasWaitedFor) {
  Loader loader(10, [](auto samples) { return numbers(samples); }, {.threads = 0});
  EXPECT_EQ(loader.waited(), 0);
  loader.next();
  EXPECT_GT(loader.waited(), 0);
}

TEST(Loader, WaitsForEverIfToldSo) {
  Loader loader(10, numbers,
                {.batch_size = 2,
                 .timeout = std::chrono::milliseconds::max(),
                 .sampler = {.shuffle = false}});
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(samples_of(loader.next()), (std::vector<int64_t>{2 * i, 2 * i + 1}));
}

TEST(LoaderErrors, NameAReadThatDoesNotReturn) {
  std::mutex mutex;
  std::condition_variable changed;
  bool may_return = false;
  const auto read = [&](c10::ArrayRef<int64_t> samples) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return may_return; });
    return numbers(samples);
  };
  Loader loader(10, read, {.batch_size = 2, .timeout = 50ms, .sampler = {.shuffle = false}});
  EXPECT_THAT(message_of<c10::Error>([&] { loader.next(); }),
              HasSubstr("Loader::next: expected the 2 samples from position 0 on to be read within "
                        "50 ms"));
  EXPECT_EQ(loader.position(), 0);
  {
    const std::lock_guard lock(mutex);
    may_return = true;
  }
  changed.notify_all();
  for (;;) {  // as long as the machine needs
    try {
      EXPECT_EQ(samples_of(loader.next()), (std::vector<int64_t>{0, 1}));
      break;
    } catch (const c10::Error&) {
      continue;
    }
  }
}

TEST(LoaderErrors, SayWhatIsExpectedOfOptionsAndTensors) {
  const auto made = [](LoaderOptions options) {
    return message_of([&] { Loader(10, numbers, std::move(options)); });
  };
  EXPECT_THAT(made({.batch_size = 0}), HasSubstr("Loader: expected a batch_size of at least 1"));
  EXPECT_THAT(made({.threads = -1}), HasSubstr("Loader: expected threads from 0 to 256, got -1"));
  EXPECT_THAT(made({.prefetch = 0}), HasSubstr("threads = 0 reads nothing ahead"));
  EXPECT_THAT(made({.timeout = 0ms}), HasSubstr("Loader: expected a timeout above 0"));
  EXPECT_THAT(made({.device = c10::Device(c10::kXPU)}), HasSubstr("a device that is there"));
  EXPECT_THAT(message_of([] { Loader(10, nullptr); }), HasSubstr("a function that reads samples"));
  EXPECT_THAT(message_of([] { Loader(0, numbers); }), HasSubstr("at least 1 sample"));
  const auto read = [](std::vector<at::Tensor> tensors) {
    Loader loader(10, [tensors](auto) { return tensors; }, {.batch_size = 2});
    return message_of([&] { loader.next(); });
  };
  EXPECT_THAT(read({at::zeros({3, 2})}), HasSubstr("expected 2 samples along the first dimension"));
  EXPECT_THAT(read({at::zeros({})}), HasSubstr("got a tensor of []"));
  EXPECT_THAT(read({at::Tensor()}), HasSubstr("an undefined one"));
  Loader loader(10, numbers);
  EXPECT_THAT(message_of([&] { loader.seek(-1); }), HasSubstr("a position of at least 0"));
}

TEST(Loader, ReadsACorpus) {
  const testing::TemporaryFolder folder;
  std::ofstream(folder.path() / "text.txt") << "0123456789abcdefghij";
  const Corpus corpus({folder.path().string()});
  const auto read = [corpus](c10::ArrayRef<int64_t> rows) {
    return std::vector<at::Tensor>{corpus.windows(rows, 4, 5)};
  };
  Loader loader(4, read, {.batch_size = 2, .sampler = {.shuffle = false}});
  EXPECT_TRUE(at::equal(loader.next()[0].select(1, 4),
                        at::tensor(std::vector<int64_t>{'4', '8'}, at::kLong)));
}

TEST(LoaderOnCuda, BatchesLieOnTheDeviceOfTheCurrentStream) {
  if (testing::gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const c10::Device device(c10::kCUDA, 0);
  constexpr int64_t kWide = 1 << 18;
  const auto read = [](c10::ArrayRef<int64_t> samples) {
    return std::vector<at::Tensor>{
        at::tensor(samples, at::kFloat).unsqueeze(1).expand({-1, kWide}).contiguous()};
  };
  Loader loader(
      64, read,
      {.batch_size = 4, .threads = 2, .prefetch = 3, .device = device, .sampler = place(0, 1)});
  ShardedSampler sampler(64, place(0, 1));
  for (int i = 0; i < 40; ++i) {
    const auto batch = loader.next().at(0);
    ASSERT_EQ(batch.device(), device);
    const auto expected = at::tensor(sampler.next(4), at::kFloat);
    const auto busy = at::mm(at::ones({1024, 1024}, device), at::ones({1024, 1024}, device));
    EXPECT_TRUE(at::equal(batch.amax(1).cpu(), expected));
    EXPECT_TRUE(at::equal(batch.amin(1).cpu(), expected));
  }
}

}  // namespace
}  // namespace tessera::data
