// What a run survives, and what it says when it does not.
#include "train/train_run.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(TrainResume, GoesOnWithTheSameBits) {
  const TrainingGround ground;
  for (const Words& layout :
       {Words{"--dropout", "0.1"}, Words{"--parallel", "fully_shard"}, Words{"--accumulate", "2"},
        Words{"--mesh", "tp=2"}, Words{"--precision", "fp16"}, Words{"--compile"},
        Words{"--comm-hook", "powersgd"},
        Words{"--ranks", "4", "--mesh", "dp=2,tp=2", "--comm-hook", "powersgd"}}) {
    const auto run = "run" + std::to_string(layout.size()) + layout.back();
    auto words = layout;
    words.insert(words.end(), {"--keep-last", "0"});
    ASSERT_TRUE(ground.train(run, words).status.ok());
    auto straight = ground.losses(run);
    straight.erase(straight.begin(), straight.upper_bound(4));
    fs::remove_all(fs::path(ground.run(run)) / "checkpoints" / "step-00000012");
    fs::remove_all(fs::path(ground.run(run)) / "checkpoints" / "step-00000008");
    fs::remove(fs::path(ground.run(run)) / "metrics.jsonl");
    const auto result = ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run(run)});
    ASSERT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, HasSubstr("goes on after step 4"));
    EXPECT_EQ(ground.losses(run), straight) << run;
  }
}

TEST(TrainResume, OnOtherRanksAndInAnotherLayout) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--keep-last", "0"}).status.ok());
  const auto straight = ground.losses("run");
  for (const Words& layout :
       {Words{"--ranks", "1"}, Words{"--ranks", "4", "--parallel", "fully_shard"},
        Words{"--ranks", "2", "--mesh", "tp=2", "--parallel", "replicate"},
        Words{"--ranks", "4", "--mesh", "dp=2,tp=2", "--parallel", "fully_shard"}}) {
    for (const auto* later : {"step-00000008", "step-00000012"})
      fs::remove_all(fs::path(ground.run("run")) / "checkpoints" / later);
    Words words = {TESSERA_TOOL, "train", "--resume", "--run", ground.run("run")};
    words.insert(words.end(), layout.begin(), layout.end());
    fs::remove(fs::path(ground.run("run")) / "metrics.jsonl");
    const auto result = ground.call(words);
    ASSERT_TRUE(result.status.ok()) << result.output;
    ASSERT_EQ(ground.losses("run").size(), 8);
    EXPECT_LT(largest_difference(ground.losses("run"), straight), 2e-3) << layout.back();
  }
}

TEST(TrainSurvives, BeingTerminated) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("straight", {"--steps", "60"}).status.ok());
  auto job = ground.start("run", {"--steps", "60", "--save-every", "0"});
  ground.await_step("run", 5);
  job.signal(SIGTERM);
  const auto status = end_of(job);
  EXPECT_EQ(status.code, 128 + SIGTERM) << job.output();
  EXPECT_THAT(job.output(), HasSubstr("stopped by SIGTERM"));
  const auto result = ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run("run")});
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_EQ(ground.losses("run"), ground.losses("straight"));
}

TEST(TrainSurvives, CtrlC) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "10000", "--save-every", "0"});
  ground.await_step("run", 5);
  kill(-job.pid(), SIGINT);  // as a terminal does: to the launcher and to all it has started
  EXPECT_EQ(end_of(job).code, 130) << job.output();
  EXPECT_EQ(ground.checkpoints("run").size(), 1);
}

TEST(TrainSurvives, TheDeathOfARankStopsTheJobAndIsNamed) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "10000"});
  ground.await_step("run", 5);
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 2);
  const auto begun = std::chrono::steady_clock::now();
  kill(ranks[1], SIGKILL);
  EXPECT_NE(end_of(job).code, 0);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 20s);
  EXPECT_THAT(job.output(), HasSubstr("rank 1 of 2 failed with SIGKILL"));
  EXPECT_THAT(job.output(), Not(HasSubstr("[c10d]")));  // rank 0 waits for nobody
}

TEST(TrainSurvives, TheDeathOfARankWithRestarts) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("straight", {"--steps", "60"}).status.ok());
  auto job = ground.start("run", {"--steps", "60", "--max-restarts", "2"});
  ground.await_step("run", 10);
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 2) << job.output();
  kill(ranks[0], SIGKILL);
  EXPECT_EQ(end_of(job).code, 0) << job.output();
  EXPECT_THAT(job.output(), HasSubstr("restart 1 of 2"));
  EXPECT_THAT(job.output(), HasSubstr("goes on after step"));
  EXPECT_EQ(ground.losses("run"), ground.losses("straight"));
}

TEST(TrainSurvives, ALossThatIsNotFiniteByStopping) {
  const TrainingGround ground;
  const auto result = ground.train("run", {"--lr", "1e20", "--clip", "0", "--steps", "30",
                                           "--warmup", "0", "--max-restarts", "3"});
  EXPECT_EQ(result.status.code, 3) << result.output;
  EXPECT_THAT(result.output, Not(HasSubstr("restart 1")));  // it would come to the same
  EXPECT_THAT(result.output, HasSubstr("is not finite; first not finite: "));
  EXPECT_THAT(result.output, HasSubstr(" on rank 0"));
  EXPECT_THAT(result.output, HasSubstr("--skip-nonfinite"));
  // Told once, by the last line.
  const auto last = result.output.rfind('\n', result.output.size() - 2) + 1;
  EXPECT_EQ(result.output.find("is not finite"), result.output.find("is not finite", last));
  EXPECT_THAT(result.output.substr(last), StartsWith("tessera train: expected a finite loss"));
}

TEST(TrainSurvives, ALossThatIsNotFiniteByLeavingStepsOut) {
  const TrainingGround ground;
  const Words diverging = {
      "--lr",         "1e20", "--clip",      "0", "--warmup", "0", "--skip-nonfinite",
      "--save-every", "1",    "--keep-last", "0"};
  auto few = diverging;
  few.insert(few.end(), {"--steps", "10"});
  const auto result = ground.train("few", few);
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("step left out"));
  EXPECT_THAT(ground.read("few", "metrics.jsonl"), HasSubstr("\"nonfinite\""));
  EXPECT_LT(ground.checkpoints("few").size(), 10) << "steps that were left out are not saved";
  // Where nothing halts the next step is issued before it is known that one was left out.
  const Words unhalted = {
      "--lr",         "1e20", "--clip",  "0", "--warmup", "0", "--skip-nonfinite",
      "--save-every", "0",    "--steps", "10"};
  ASSERT_TRUE(ground.train("unhalted", unhalted).status.ok());
  EXPECT_EQ(ground.losses("unhalted"), ground.losses("few"));

  auto many = diverging;
  many.insert(many.end(), {"--steps", "60"});
  const auto stopped = ground.train("many", many);
  EXPECT_EQ(stopped.status.code, 3) << stopped.output;
  EXPECT_THAT(stopped.output, HasSubstr("20 steps in a row"));
}

/// The words of a run whose folder lies on a disk of so many bytes, which goes with the job.
Words on_a_small_disk(const TrainingGround& ground, const std::string& bytes, Words words) {
  const auto disk = (ground.path() / "disk").string();
  fs::create_directory(disk);
  const std::string script = "mount -t tmpfs -o size=" + bytes + " tessera " + disk +
                             " || exit 77; \"$@\"; code=$?; "
                             "cp " +
                             disk + "/run/metrics.jsonl " + disk +
                             "/../ 2>/dev/null; "
                             "ls " +
                             disk + "/run/checkpoints; exit $code";
  Words all = {"unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

/// Room for two checkpoints of the small model, not for three: the last good one stays.
TEST(TrainSurvives, AFullDisk) {
  const TrainingGround ground;
  const auto whole = ground.train("whole", {"--steps", "4", "--save-every", "4"});
  ASSERT_TRUE(whole.status.ok()) << whole.output;
  int64_t bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(ground.run("whole") + "/checkpoints"))
    bytes += file.is_regular_file() ? static_cast<int64_t>(file.file_size()) : 0;
  const auto words = ground.words("disk/run", {"--steps", "40", "--keep-last", "0"});
  const auto result = ground.call(on_a_small_disk(ground, std::to_string(bytes * 5 / 2), words));
  if (result.status.code == 77 || result.output.find("unshare: ") != std::string::npos)
    GTEST_SKIP() << "no file systems can be mounted here: " << result.output;
  // 1: a line of metrics.jsonl came upon the full disk first.
  EXPECT_TRUE(result.status.code == 4 || result.status.code == 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("No space left on device"));
  EXPECT_THAT(result.output, HasSubstr("the last saved checkpoint is " + ground.run("disk/run") +
                                       "/checkpoints/step-00000008"));
  EXPECT_THAT(result.output, HasSubstr("step-00000008\n"));
  EXPECT_THAT(result.output, Not(HasSubstr("step-00000012\n")));
}

/// Killed, all of it, while a checkpoint grows: what was saved before is whole, and no rest stays.
TEST(TrainSurvives, BeingKilledDuringASave) {
  const TrainingGround ground;
  const Words larger = {"--width", "256", "--steps", "12", "--save-every", "2", "--keep-last", "3"};
  ASSERT_TRUE(ground.train("straight", larger).status.ok());
  auto job = ground.start("run", larger);
  ground.await_step("run", 4);
  const auto is_growing = [&] {
    std::error_code ignored;
    const auto folder = ground.run("run") + "/checkpoints";
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      if (!entry.path().filename().string().starts_with("step-")) return true;
    }
    return false;
  };
  for (int i = 0; i < 20000 && !is_growing(); ++i) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(is_growing());
  kill(-job.pid(), SIGKILL);
  end_of(job);
  const auto result = ground.call({TESSERA_TOOL, "train", "--resume", "--run", ground.run("run")});
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("goes on after step "));
  EXPECT_EQ(ground.losses("run"), ground.losses("straight"));
  EXPECT_FALSE(is_growing()) << "what the killed job left was not taken away";
}

TEST(TrainSurvives, TheDeathOfARankBeforeTheFirstCheckpoint) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "60", "--save-every", "50", "--max-restarts", "1"});
  ground.await_step("run", 2);
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 2) << job.output();
  kill(ranks[1], SIGKILL);
  EXPECT_EQ(end_of(job).code, 0) << job.output();
  EXPECT_EQ(ground.losses("run").size(), 60);
}

TEST(TrainResume, TakesTheCheckpointBeforeADamagedOne) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run").status.ok());
  fs::resize_file(fs::path(ground.run("run")) / "checkpoints/step-00000012/index.json", 100);
  const auto result = ground.train("run", {"--resume", "--steps", "14"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("goes on after step 8"));
}

TEST(TrainResume, TakesSettingsThatAreGiven) {
  const TrainingGround ground;
  for (const auto* decay : {"0", "10"}) {
    const auto run = std::string("decay") + decay;
    ASSERT_TRUE(ground.train(run, {"--steps", "4", "--weight-decay", "0"}).status.ok());
    ASSERT_TRUE(
        ground.train(run, {"--resume", "--steps", "12", "--weight-decay", decay}).status.ok());
  }
  EXPECT_NE(ground.losses("decay0").at(12), ground.losses("decay10").at(12));
}

TEST(TrainSurvives, ASecondJobInItsFolderIsRefused) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "10000"});
  ground.await_step("run", 5);
  const auto second = ground.train("run", {"--resume"});
  EXPECT_NE(second.status.code, 0);
  EXPECT_THAT(second.output, HasSubstr("which process " + std::to_string(ranks_of(job.pid())[0]) +
                                       " is training in"));
  struct stat lock{};
  ASSERT_EQ(stat((ground.run("run") + "/.lock").c_str(), &lock), 0);
  EXPECT_EQ(lock.st_mode & 0777, 0600U) << "who can open it can hold it";
  job.signal(SIGTERM);
  EXPECT_EQ(end_of(job).code, 143);
}

/// Readers of the folder can't keep a job out; those who may write to it can, and are named.
TEST(TrainSurvives, ALockThatReadersHold) {
  const TrainingGround ground;
  const auto run = ground.run("run");
  fs::create_directory(run);
  fs::permissions(run, fs::perms(0755));
  const auto lock = run + "/.lock";
  std::ofstream(lock) << "4242\n";  // whoever that was
  fs::permissions(lock, fs::perms(0644));
  const int readable = open(lock.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(readable, LOCK_EX), 0);
  const auto first = ground.train("run", {"--steps", "2"});
  close(readable);
  EXPECT_TRUE(first.status.ok()) << first.output;

  const int writable = open(lock.c_str(), O_RDWR | O_CLOEXEC);
  struct flock whole{};
  whole.l_type = F_WRLCK;
  ASSERT_EQ(fcntl(writable, F_SETLK, &whole), 0);
  const auto second = ground.train("run", {"--resume", "--steps", "4"});
  close(writable);
  EXPECT_NE(second.status.code, 0);
  EXPECT_THAT(second.output,
              HasSubstr("which process " + std::to_string(getpid()) + " is training"));
  EXPECT_THAT(second.output, Not(HasSubstr("4242")));
}

TEST(TrainSurvives, ALockOfAFolderThatAGroupWritesTo) {
  const TrainingGround ground;
  const auto run = ground.run("run");
  fs::create_directory(run);
  fs::permissions(run, fs::perms(0775));
  ASSERT_TRUE(ground.train("run", {"--steps", "2"}).status.ok());
  struct stat lock{};
  ASSERT_EQ(stat((run + "/.lock").c_str(), &lock), 0);
  EXPECT_EQ(lock.st_mode & 0777, 0660U);
}

TEST(TrainSurvives, NoTextThatChangesUnderIt) {
  const TrainingGround ground;
  auto job = ground.start("run", {"--steps", "10000"});
  ground.await_step("run", 5);
  const auto file = ground.path() / "text" / "small.txt";
  fs::last_write_time(file, fs::file_time_type::clock::now());  // touched alone: that is no change
  ground.await_step("run", static_cast<int>(ground.losses("run").size()) + 5);
  {
    std::fstream text(file, std::ios::in | std::ios::out);
    text.seekp(5000).put('#');
  }
  EXPECT_NE(end_of(job).code, 0) << job.output();
  EXPECT_THAT(
      job.output(),
      AllOf(HasSubstr("expected '" + file.string() + "' to stay as it was when it was opened"),
            HasSubstr("; put it back, or start a new run"),
            HasSubstr("; once the text is as it was, go on with --resume --run ")));
}

TEST(TrainSurvives, ARunThatIsThereIsNotOverwritten) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--steps", "2"}).status.ok());
  const auto before = ground.read("run", "metrics.jsonl");
  const auto second = ground.train("run", {"--steps", "2"});
  EXPECT_NE(second.status.code, 0);
  EXPECT_THAT(second.output, HasSubstr("--resume"));
  EXPECT_EQ(ground.read("run", "metrics.jsonl"), before);
}

TEST(TrainSurvives, ADamagedCheckpointIsRefusedByName) {
  const TrainingGround ground;
  ASSERT_TRUE(ground.train("run", {"--keep-last", "1"}).status.ok());
  const auto file =
      fs::path(ground.run("run")) / "checkpoints/step-00000012/rank-00001-of-00002.safetensors";
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(-100, std::ios::end);
  stream.put('\x55');
  stream.close();
  const auto result = ground.train("run", {"--resume", "--steps", "20"});
  EXPECT_NE(result.status.code, 0);
  EXPECT_THAT(result.output, HasSubstr("rank-00001-of-00002.safetensors"));
}

}  // namespace
}  // namespace tessera::testing
