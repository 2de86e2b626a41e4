// How checkpoints come to be: in one step, or not at all.
#include <tessera/tessera.h>

#include "parallel/warnings.h"
#include "state/checkpoint_training.h"
#include "state/save_job.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <set>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

nn::Linear filled(double value, int64_t width = 3) {
  nn::Linear net(width, width);
  const at::NoGradGuard no_grad;
  net->weight.fill_(value);
  net->bias.fill_(value);
  return net;
}

void expect_filled(const std::string& dir, double value, int64_t width = 3) {
  auto net = filled(-1, width);
  load(dir, net, {.group = {}});
  expect_bitwise_equal(net->weight.detach(), at::full({width, width}, value));
}

TEST(CheckpointSave, MakesParentsAndLeavesNothingElse) {
  const TemporaryFolder folder;
  const auto dir = folder.path() / "a" / "b" / "step-1";
  save(dir.string() + "/", filled(1), {{"step", "1"}});
  EXPECT_EQ(names_in(dir),
            (std::set<std::string>{"index.json", "rank-00000-of-00001.safetensors"}));
  EXPECT_EQ(names_in(dir.parent_path()), (std::set<std::string>{"step-1"}));
  expect_filled(dir, 1);
}

TEST(CheckpointSave, ReplacesAnOlderOneAndWhatACrashLeft) {
  const TemporaryFolder folder;
  const auto dir = folder.path() / "last";
  save(dir, filled(1));
  fs::create_directories(folder.path() / ".last.saving" / "half");
  save(dir, filled(2));
  expect_filled(dir, 2);
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"last"}));
}

TEST(CheckpointSave, OnOtherRanksReplacesAnOlderOne) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "last").string();
  save(dir, filled(1));
  run_threads(3, [&] { save(dir, filled(2)); });
  EXPECT_EQ(read_checkpoint_index(dir).world_size, 3);
  expect_filled(dir, 2);
}

TEST(CheckpointSave, KeepsTheLastOnes) {
  const TemporaryFolder folder;
  const auto at_step = [&](int step) {
    return (folder.path() / ("step-" + std::to_string(step))).string();
  };
  save((folder.path() / "best-1").string(), filled(0));
  fs::create_directories(folder.path() / "step-0");  // no checkpoint
  fs::create_directories(folder.path() / ".step-3.saving");
  for (const int step : {8, 9, 10, 11}) save(at_step(step), filled(step), {}, {.keep_last = 2});
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{"best-1", "step-0", "step-10", "step-11"}));
  EXPECT_EQ(latest_checkpoint(folder.path()), at_step(11));
}

TEST(CheckpointSave, DamagedOnesAreNotAmongTheLastThatAreKept) {
  const TemporaryFolder folder;
  const auto at_step = [&](int step) {
    return (folder.path() / ("step-" + std::to_string(step))).string();
  };
  for (const int step : {1, 2, 3, 4, 5}) save(at_step(step), filled(step));
  const std::string file = "/rank-00000-of-00001.safetensors";
  fs::resize_file(at_step(1) + file, 3);
  fs::resize_file(at_step(4) + file, 3);
  fs::resize_file(at_step(5) + "/index.json", 100);
  run_threads(2, [&] { save(at_step(6), filled(6), {}, {.keep_last = 2}); });
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{"step-3", "step-4", "step-5", "step-6"}))
      << "the whole 3 and 6, and no older ones";
  fs::remove(at_step(6) + "/rank-00001-of-00002.safetensors");
  save(at_step(7), filled(7), {}, {.keep_last = 3});
  expect_filled(at_step(3), 3);
  save(at_step(8), filled(8), {}, {.keep_last = 1});
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"step-8"}));
}

TEST(CheckpointSave, LatestIsTheLargestNumberThatIsWhole) {
  const TemporaryFolder folder;
  EXPECT_EQ(latest_checkpoint(folder.path()), std::nullopt);
  EXPECT_EQ(latest_checkpoint((folder.path() / "none").string()), std::nullopt);
  const auto dir = [&](const char* name) { return (folder.path() / name).string(); };
  for (const char* name : {"step-2", "step-10", "step-30", "step-40"}) save(dir(name), filled(1));
  fs::remove(folder.path() / "step-30" / "rank-00000-of-00001.safetensors");
  fs::resize_file(folder.path() / "step-40" / "index.json", 100);
  EXPECT_EQ(latest_checkpoint(folder.path()), dir("step-10"));
}

TEST(CheckpointSave, AsyncWritesWhatTheModelWas) {
  const TemporaryFolder folder;
  run_threads(2, [&] {
    auto net = filled(1, 300);
    PendingSave pending;
    for (int step = 1; step <= 4; ++step) {
      pending = save_async((folder.path() / ("step-" + std::to_string(step))).string(), net);
      const at::NoGradGuard no_grad;
      net->weight.add_(1);  // the thread writes meanwhile
      expect_bitwise_equal(all_reduce(at::ones({2})), at::full({2}, 2.0));
    }
    pending.wait();
    pending.wait();
    EXPECT_TRUE(pending.is_done());
  });
  for (int step = 1; step <= 4; ++step)
    expect_filled((folder.path() / ("step-" + std::to_string(step))).string(), step, 300);
}

TEST(CheckpointSave, AsyncOfAnOptimizer) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  run_threads(2, [&] {
    auto net = make_checkpoint_net(Layout::FullyShard);
    auto optimizer = make_adamw(net);
    train_step(net, optimizer, 0);
    const auto saved = wholes_of(net, optimizer, 0);
    auto pending = save_async(dir, net, optimizer, {{"step", "1"}});
    train_step(net, optimizer, 1);
    pending.wait();
    EXPECT_EQ(load(dir, net, optimizer).at("step"), "1");
    for (const auto& [name, tensor] : wholes_of(net, optimizer, 0))
      expect_bitwise_equal(tensor, saved.at(name), name);
  });
}

/// Files may not grow beyond this while it lives: what a full disk does to writes, with a SIGXFSZ
/// that must not end the process.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &old_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit old_{};
};

TEST(CheckpointSaveErrors, OfAsyncShowAtWaitOrTheNextSave) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  const FileSizeLimit limit(1 << 20);  // of the memory of shm, too
  run_threads(
      2,
      [&] {
        auto pending = save_async(dir, filled(1, 2000));
        EXPECT_THAT(message_of<c10::Error>([&] { pending.wait(); }),
                    ::testing::AllOf(HasSubstr("save_async: rank "), HasSubstr("File too large")));
        EXPECT_NO_THROW(pending.wait());
        {
          const CaughtWarnings warnings;
          {
            const auto forgotten = save_async(dir, filled(1, 2000));
          }
          EXPECT_THAT(warnings.texts,
                      ::testing::ElementsAre(::testing::AllOf(
                          HasSubstr("save_async: the save to " + dir),
                          HasSubstr("nobody called wait()"), HasSubstr("File too large"))));
        }
        EXPECT_THAT(message_of<c10::Error>([&] { save(dir, filled(1)); }),
                    HasSubstr("save: nothing was saved, since an earlier save_async to " + dir));
        save(dir, filled(1));
      },
      {.backend = "gloo"});
  expect_filled(dir, 1);
}

TEST(CheckpointSaveErrors, FoldersThatDifferAreToldOnAllRanks) {
  const TemporaryFolder folder;
  run_threads(3, [&] {
    const auto dir = (folder.path() / (rank() == 2 ? "b" : "a")).string();
    for (const bool is_async : {false, true}) {
      const auto call = [&] {
        is_async ? save_async(dir, filled(1)).wait() : save(dir, filled(1));
      };
      EXPECT_THAT(message_of(call), HasSubstr("expected the same folder on all ranks, got " +
                                              (folder.path() / "a").string() + " on rank 0 and " +
                                              (folder.path() / "b").string() + " on rank 2"));
    }
  });
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{}));
}

TEST(CheckpointLoadErrors, FoldersThatDifferAreToldOnAllRanks) {
  const TemporaryFolder folder;
  for (const int value : {1, 2})
    save((folder.path() / std::to_string(value)).string(), filled(value));
  fs::create_directory_symlink(folder.path() / "1", folder.path() / "link");
  run_threads(3, [&] {
    auto net = filled(7);
    const auto path = [&](const std::string& name) { return (folder.path() / name).string(); };
    EXPECT_THAT(message_of([&] { load(path(rank() == 2 ? "2" : "1"), net); }),
                HasSubstr("load: expected the same folder on all ranks, got " + path("1") +
                          " on rank 0 and " + path("2") + " on rank 2"));
    EXPECT_THAT(message_of([&] { load(path(rank() == 1 ? "none" : "1"), net); }),
                HasSubstr(path("none") + " on rank 1"));
    expect_bitwise_equal(net->weight.detach(), at::full({3, 3}, 7.0), "nothing was loaded");
    load(path(rank() == 1 ? "link/" : "1"), net);
    expect_bitwise_equal(net->weight.detach(), at::full({3, 3}, 1.0), "by another path");
  });
}

TEST(CheckpointLoadErrors, OneRankLoadsWhileAnotherSaves) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  save(dir, filled(1));
  run_threads(3, [&] {
    for (const bool is_async : {false, true}) {
      auto net = filled(7);
      const std::string saving = is_async ? "save_async" : "save";
      EXPECT_THAT(message_of([&] {
                    if (rank() == 1)
                      load(dir, net);
                    else
                      is_async ? save_async(dir, net).wait() : save(dir, net);
                  }),
                  HasSubstr("expected all ranks to call the same function, but rank 0 calls " +
                            saving + "(\"" + dir + "\") and rank 1 calls load(\"" + dir + "\")"));
      expect_bitwise_equal(net->weight.detach(), at::full({3, 3}, 7.0), "nothing was loaded");
    }
  });
  expect_filled(dir, 1);
}

TEST(CheckpointSaveErrors, AFullDiskLeavesTheOlderCheckpoint) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  save(dir, filled(1, 1000));
  {
    const FileSizeLimit limit(1 << 20);
    EXPECT_THAT(
        message_of<c10::Error>([&] { save(dir, filled(2, 1000)); }),
        ::testing::AllOf(HasSubstr("save: "), HasSubstr("could not write to it: File too large"),
                         HasSubstr("rank-00000-of-00001.safetensors")));
  }
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"a"}));
  expect_filled(dir, 1, 1000);
}

/// Seen by the processes of a test and its parent.
std::string shared_path(const std::string& variable) { return std::getenv(variable.c_str()); }

TEST(CheckpointSaveOnProcesses, ADiskFullForOneRankIsAnErrorOfAllThatNamesIt) {
  const TemporaryFolder folder;
  const auto dir = folder.path() / "a";
  run_processes(3,
                [] {
                  const auto shared = shared_path("TEST_CHECKPOINT");
                  save(shared, filled(1, 1000));
                  auto net = filled(2, 1000);
                  fully_shard(net);
                  std::optional<FileSizeLimit> limit;
                  if (rank() == 1) limit.emplace(1 << 20);
                  EXPECT_THAT(
                      message_of<c10::Error>([&] { save(shared, net); }),
                      ::testing::AllOf(HasSubstr("save: rank 1: "), HasSubstr("File too large")));
                },
                {.environment = {{"TEST_CHECKPOINT", dir.string()}}});
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"a"}));
  expect_filled(dir, 1, 1000);
}

TEST(CheckpointSaveOnProcesses, ARankKilledInTheMiddleLeavesTheOlderCheckpoint) {
  const TemporaryFolder folder;
  const auto dir = folder.path() / "a";
  RankProcesses ranks(2,
                      [] {
                        const auto shared = shared_path("TEST_CHECKPOINT");
                        save(shared, filled(1, 2000));
                        Beacon("saved." + std::to_string(rank())).signal();
                        try {
                          for (int i = 0; i < 10'000; ++i) save(shared, filled(1, 2000));
                          ADD_FAILURE() << "nobody was killed";
                        } catch (const c10::Error& error) {
                          EXPECT_THAT(error.what_without_backtrace(), HasSubstr("rank 1"));
                        }
                      },
                      {.may_die = {1}, .environment = {{"TEST_CHECKPOINT", dir.string()}}});
  EXPECT_TRUE(ranks.beacon("saved.0").wait());
  EXPECT_TRUE(ranks.beacon("saved.1").wait());
  std::this_thread::sleep_for(std::chrono::milliseconds(137));
  ranks.kill(1);
  ranks.join();
  verify_checkpoint(dir);
  expect_filled(dir, 1, 2000);
  save(dir, filled(3));
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"a"}));
}

TEST(CheckpointSaveOnProcesses, ARankKilledBeforeItIsToldLeavesASaveThatWasMade) {
  const TemporaryFolder folder;
  const auto dir = folder.path() / "a";
  run_processes(2,
                [] {
                  const auto shared = shared_path("TEST_CHECKPOINT");
                  nn::Linear net(torch::nn::LinearOptions(3, 3).bias(false));  // rank 0 writes it
                  if (rank() == 1) {  // all that a rank without tensors does, but for the last step
                    state::SaveJob job("save", shared, *net, nullptr, {}, {});
                    job.ranks().run("save", [] { return std::string(); });
                    job.ranks().run("save", [] { return std::string("[]"); });
                    raise(SIGKILL);
                  }
                  const CaughtWarnings warnings;
                  save(shared, net);
                  EXPECT_THAT(warnings.texts,
                              ::testing::ElementsAre(::testing::AllOf(
                                  HasSubstr("save: " + shared + " is whole and in its place"),
                                  HasSubstr("rank 1"))));
                },
                {.may_die = {1}, .environment = {{"TEST_CHECKPOINT", dir.string()}}});
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"a"}));
  EXPECT_TRUE(fs::exists(dir / "index.json"));
}

}  // namespace
}  // namespace tessera::testing
