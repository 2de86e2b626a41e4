#include "support/subprocess.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

ProgramResult bench(const Words& words) {
  Words arguments = {TESSERA_TOOL, "bench"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  return run_program({.arguments = arguments}, std::chrono::seconds(120));
}

Words split(const std::string& line) {
  Words fields;
  std::istringstream stream(line + ",");
  for (std::string field; std::getline(stream, field, ',');) fields.push_back(field);
  return fields;
}

/// A table of the benchmark, as it lies in its file.
struct Table {
  Words columns;
  std::vector<std::map<std::string, std::string>> rows = {};

  explicit Table(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    columns = split(line);
    while (std::getline(file, line)) {
      const auto fields = split(line);
      EXPECT_EQ(fields.size(), columns.size()) << line;
      auto& row = rows.emplace_back();
      for (size_t i = 0; i < std::min(fields.size(), columns.size()); ++i)
        row[columns[i]] = fields[i];
    }
  }
  double number(size_t row, const std::string& column) const {
    const auto& text = rows.at(row).at(column);
    size_t length = 0;
    const double value = text.empty() ? -1 : std::stod(text, &length);
    EXPECT_EQ(length, text.size()) << column << ": " << text;
    return value;
  }
};

void expect_refused(const Words& words, const std::string& wrong, const std::string& known) {
  const auto result = bench(words);
  EXPECT_FALSE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr(wrong));
  EXPECT_THAT(result.output, HasSubstr(known));
}

/// Of a wrong number: one line, told once, with the range.
TEST(Bench, TellsTheRangeOfANumber) {
  const std::string huge = "99999999999999999999";
  struct {
    std::string question, option, value, range;
  } const cases[] = {
      {"comm", "--bytes", huge, "--bytes: expected a number from 0 to 1099511627776"},
      {"comm", "--sizes", "4096," + huge, "--sizes: expected a number from 0 to "},
      {"comm", "--sizes", "4k", "--sizes: expected a number from 0 to "},
      {"comm", "--repeats", "0", "--repeats: expected a number from 1 to 1000000"},
      {"comm", "--wait", "nan", "--wait: expected a number from 0 to 3600"},
      {"comm", "--ranks", huge, "--ranks: expected a number from 1 to 4096"},
      {"train", "--steps", "-1", "--steps: expected a number from 0 to 1000000"},
      {"memory", "--blocks", huge, "--blocks: expected a number from 1 to 10000"},
      {"compile", "--nodes", "1e3", "--nodes: expected a number from 1 to 1000000"}};
  for (const auto& [question, option, value, range] : cases) {
    const auto result = bench({question, option, value});
    EXPECT_EQ(result.status.code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr("tessera bench"));
    EXPECT_THAT(result.output, HasSubstr(range));
    EXPECT_THAT(result.output, HasSubstr(", got '"));
    EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << result.output;
  }
}

TEST(Bench, NamesTheOptionsItKnows) {
  const auto result = bench({"comm", "--repeat", "3"});
  EXPECT_EQ(result.status.code, 2);
  EXPECT_EQ(result.output,
            "tessera bench comm: unknown option '--repeat', did you mean --repeats?; see tessera "
            "bench comm --help\n");
}

TEST(Bench, ShowsRanksInTheHelpOfQuestionsToSeveral) {
  for (const std::string question : {"comm", "memory", "train"}) {
    const auto result = bench({question, "--help"});
    EXPECT_TRUE(result.status.ok()) << result.output;
    EXPECT_THAT(result.output, ContainsRegex("--ranks INT( \\[2\\]|=2) +Number of ranks"));
  }
  const auto misspelt = bench({"comm", "--rank", "4"});
  EXPECT_THAT(misspelt.output, HasSubstr("unknown option '--rank', did you mean --ranks?"));
}

TEST(Bench, SaysInOneLineThatThereIsNoGpu) {
  for (const std::string question : {"comm", "compile", "train"}) {
    const auto result =
        run_program({.arguments = {TESSERA_TOOL, "bench", question, "--device", "cuda"},
                     .environment = {{"CUDA_VISIBLE_DEVICES", ""}}},
                    std::chrono::seconds(120));
    EXPECT_EQ(result.status.code, 2);
    EXPECT_EQ(result.output, "tessera bench " + question +
                                 ": --device cuda: expected a GPU, but libtorch finds none; use "
                                 "--device cpu, or a CUDA build of libtorch where a GPU is "
                                 "visible\n");
  }
}

TEST(BenchComm, WritesRowsOfEveryBackendAndBoundsAgainstGloo) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "comm.csv";
  const auto result = bench({"comm", "--ops", "all_reduce", "--sizes", "4096", "--repeats", "2",
                             "--wait", "0", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  EXPECT_THAT(table.columns, ElementsAre("op", "dtype", "bytes", "ranks", "device", "backend", "us",
                                         "gbps", "vs_gloo", "vs_memcpy"));
  Words backends;
  for (const auto& row : table.rows) {
    EXPECT_EQ(row.at("device"), "cpu");
    backends.push_back(row.at("backend"));
  }
  EXPECT_THAT(backends, ElementsAre("shm", "shm (shared tensors)", "gloo", "gloo (calls unchecked)",
                                    "c10d_gloo"));
  std::ifstream bounds(folder.path() / "comm.bounds.txt");
  std::string first;
  std::getline(bounds, first);
  EXPECT_THAT(first, HasSubstr("all_reduce of 4096 bytes of float32 on cpu, 2 ranks, shm against "
                               "gloo, medians over 2 repeats: ratio "));
}

TEST(BenchComm, RefusesBackendsThatCannotTakeTheTensors) {
  expect_refused({"comm", "--backends", "nccl"},
                 "expected --backends that take float32 tensors on cpu", "got nccl");
}

TEST(BenchTrain, ListsTheChoicesOfBothDevices) {
  const auto result = bench({"train", "--list"});
  EXPECT_TRUE(result.status.ok());
  EXPECT_EQ(result.output,
            "--device cpu\n"
            "  jobs: mlp,net2000,gpt,qwen\n"
            "  modes: eager,replicate,fully_shard,tp,compile,replicate+compile,"
            "fully_shard+compile,tp+compile\n"
            "  peers: pytorch,pytorch_malloc,pytorch_compile,jax,eager,reducer_gloo,reducer_shm\n"
            "--device cuda\n"
            "  jobs: mlp,gpt,gpt12x768,gpt2,qwen\n"
            "  modes: eager,replicate,fully_shard,fp8,fp8_rowwise,compile,fp8+compile,"
            "fp8_rowwise+compile\n"
            "  peers: pytorch,pytorch_compile,pytorch_graph,pytorch_graph_compile\n");
}

TEST(BenchTrain, WritesOneRowPerPeer) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "train.csv";
  const auto result = bench({"train", "--jobs", "mlp", "--modes", "replicate", "--peer",
                             "reducer_shm", "--pairs", "1", "--steps", "2", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  EXPECT_THAT(table.columns,
              ElementsAre("job", "mode", "ranks", "tessera_ms", "peer", "peer_ms", "ratio",
                          "limit_ms", "vs_limit", "tessera_tokens_s", "peer_tokens_s",
                          "tessera_mib", "tessera_peak_mib", "peer_mib", "peer_peak_mib"));
  ASSERT_EQ(table.rows.size(), 1U);
  EXPECT_EQ(table.rows[0].at("job"), "mlp");
  EXPECT_EQ(table.rows[0].at("mode"), "replicate");
  EXPECT_EQ(table.rows[0].at("ranks"), "2");
  EXPECT_EQ(table.rows[0].at("peer"), "reducer_shm");
  for (const char* column : {"tessera_ms", "peer_ms", "ratio", "limit_ms", "vs_limit"})
    EXPECT_GT(table.number(0, column), 0) << column;
  EXPECT_NEAR(table.number(0, "ratio"), table.number(0, "peer_ms") / table.number(0, "tessera_ms"),
              0.01);
  for (const char* column : {"tessera_tokens_s", "peer_tokens_s", "tessera_mib", "peer_peak_mib"})
    EXPECT_EQ(table.rows[0].at(column), "") << column << " of a job without tokens on a CPU";
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "train.machine.txt"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "train.bounds.txt"));
}

TEST(BenchTrain, ComparesCompiledStepsWithOurOwn) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "train.csv";
  const auto result = bench({"train", "--jobs", "mlp", "--modes", "replicate+compile", "--peer",
                             "eager", "--pairs", "1", "--steps", "2", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  EXPECT_EQ(Table(path).rows.size(), 1);
}

/// What a process does alone: PyTorch needs no parallel function for it.
TEST(BenchTrain, ComparesOneProcessWithPyTorch) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "train.csv";
  const auto result = bench({"train", "--ranks", "1", "--jobs", "mlp", "--modes", "eager,compile",
                             "--peer", "pytorch", "--pairs", "1", "--steps", "2", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  ASSERT_EQ(table.rows.size(), 2);
  EXPECT_EQ(table.rows[1].at("mode"), "compile");
  EXPECT_EQ(table.rows[1].at("ranks"), "1");
  EXPECT_GT(table.number(1, "ratio"), 0);
}

/// Before it times them, it compares losses and parameters of both sides.
TEST(BenchTrain, TrainsTheSameQwenAsPyTorch) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "train.csv";
  const auto result = bench({"train", "--ranks", "1", "--jobs", "qwen", "--modes", "eager,compile",
                             "--peer", "pytorch", "--pairs", "1", "--steps", "1", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  ASSERT_EQ(table.rows.size(), 2);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(table.rows[i].at("job"), "qwen");
    constexpr double kTokens = 2 * 64;
    EXPECT_NEAR(table.number(i, "tessera_tokens_s") * table.number(i, "tessera_ms"), 1e3 * kTokens,
                1e3)
        << i;
    EXPECT_GT(table.number(i, "peer_tokens_s"), 0);
  }
}

TEST(BenchTrain, ComparesWithJaxWhereItIs) {
  const auto result = bench({"train", "--ranks", "1", "--jobs", "mlp,gpt", "--modes", "compile",
                             "--peer", "jax", "--pairs", "1", "--steps", "2"});
  if (result.output.find("pip install jax") != std::string::npos)
    GTEST_SKIP() << "jax is not installed";
  EXPECT_TRUE(result.status.ok()) << result.output;
  EXPECT_THAT(result.output, HasSubstr("gpt,compile,1,"));
}

TEST(BenchCompile, TellsHowLongItTakes) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "compile.csv";
  const auto result =
      bench({"compile", "--blocks", "1", "--repeats", "1", "--nodes", "20", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  EXPECT_THAT(table.columns, ElementsAre("job", "device", "blocks", "side", "ready_s", "cached_s",
                                         "kernels", "eager_ms", "compiled_ms"));
  ASSERT_EQ(table.rows.size(), 1);
  EXPECT_EQ(table.rows[0].at("device"), "cpu");
  EXPECT_EQ(table.rows[0].at("side"), "tessera");
  // Less eager calls: about nothing from the cache.
  EXPECT_NEAR(table.number(0, "ready_s"), 0, 30);
  EXPECT_NEAR(table.number(0, "cached_s"), 0, 30);
  EXPECT_GE(table.number(0, "kernels"), 0);
  const Table nodes(folder.path() / "compile-nodes.csv");
  ASSERT_EQ(nodes.rows.size(), 3);
  for (size_t i = 0; i < 3; ++i) EXPECT_GT(nodes.number(i, "program_us"), 0);
}

TEST(BenchCompile, NamesWhatItKnows) {
  expect_refused({"compile", "--peer", "jax"}, "jax not in", "pytorch");
  expect_refused({"compile", "--device", "tpu"}, "tpu not in", "cpu,cuda");
}

TEST(BenchTrain, NamesWhatItKnows) {
  expect_refused({"train", "--jobs", "resnet"}, "resnet not in", "mlp,net2000,gpt,qwen");
  expect_refused({"train", "--modes", "horovod"}, "horovod not in", "replicate");
  expect_refused({"train", "--kernels"}, "--kernels", "expected --device cuda");
  expect_refused({"train", "--peer", "mxnet"}, "mxnet not in",
                 "pytorch,pytorch_malloc,pytorch_compile,jax,eager,reducer_gloo,reducer_shm");
}

TEST(BenchMemory, ListsItsChoices) {
  const auto result = bench({"memory", "--list"});
  EXPECT_TRUE(result.status.ok());
  EXPECT_THAT(result.output, HasSubstr("jobs: gpt,attention\nmodes: plain,checkpoint"));
}

TEST(BenchMemory, WritesOneRowPerMode) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "memory.csv";
  const auto result =
      bench({"memory", "--blocks", "2", "--pairs", "1", "--steps", "1", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  EXPECT_THAT(table.columns, ElementsAre("job", "mode", "ranks", "blocks", "steady_bytes",
                                         "peak_bytes", "bound_bytes", "step_ms", "vs_plain"));
  ASSERT_EQ(table.rows.size(), 4U);
  EXPECT_EQ(table.rows[0].at("mode"), "plain");
  EXPECT_EQ(table.rows[0].at("bound_bytes"), "");
  EXPECT_EQ(table.rows[0].at("vs_plain"), "1.000");
  EXPECT_EQ(table.rows[1].at("mode"), "checkpoint");
  EXPECT_NEAR(table.number(1, "bound_bytes"), 0.3 * table.number(0, "peak_bytes"), 1);
  EXPECT_LT(table.number(1, "peak_bytes"), table.number(0, "peak_bytes"));
  EXPECT_EQ(table.number(1, "steady_bytes"), table.number(0, "steady_bytes"));
  EXPECT_EQ(table.rows[2].at("mode"), "fully_shard");
  EXPECT_EQ(table.rows[3].at("mode"), "fully_shard_start");
  EXPECT_EQ(table.rows[3].at("step_ms"), "") << "not timed";
  for (size_t row = 0; row < 3; ++row) {
    EXPECT_EQ(table.rows[row].at("job"), "gpt");
    EXPECT_EQ(table.rows[row].at("ranks"), "2");
    EXPECT_EQ(table.rows[row].at("blocks"), "2");
    EXPECT_GT(table.number(row, "step_ms"), 0);
    EXPECT_GT(table.number(row, "vs_plain"), 0);
    // Four numbers per parameter: itself, its gradient and two moments; a rank's part of them.
    const double parts = row == 2 ? 2 : 1;
    EXPECT_GT(table.number(row, "steady_bytes"), 4 * 4 * 2 * 12 * 256 * 256 / parts);
  }
  EXPECT_THAT(result.output, HasSubstr("bench memory: gpt: pair 1 of 1"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "memory.machine.txt"));
}

TEST(BenchMemory, AttentionToASequenceOnSeveralRanksTakesNoMoreThanItMay) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "memory.csv";
  const auto result =
      bench({"memory", "--jobs", "attention", "--tokens", "4096", "--ranks", "2", "--csv", path});
  ASSERT_TRUE(result.status.ok()) << result.output;
  const Table table(path);
  ASSERT_EQ(table.rows.size(), 2U);
  EXPECT_EQ(table.rows[0].at("job"), "attention of 4096 tokens");
  EXPECT_EQ(table.rows[0].at("mode"), "plain");
  EXPECT_EQ(table.rows[1].at("mode"), "context_parallel");
  EXPECT_EQ(table.rows[1].at("blocks"), "1");
  EXPECT_EQ(table.rows[1].at("step_ms"), "") << "not timed";
  EXPECT_LE(table.number(1, "peak_bytes"), table.number(1, "bound_bytes"));
  EXPECT_LT(table.number(1, "peak_bytes"), table.number(0, "peak_bytes"));
}

TEST(BenchMemory, FullyShardTakesNoMoreThanItMay) {
  for (const char* backend : {"shm", "gloo"}) {
    const TemporaryFolder folder;
    const auto path = folder.path() / "memory.csv";
    const auto result =
        bench({"memory", "--modes", "plain,fully_shard,fully_shard_start", "--backend", backend,
               "--blocks", "6", "--pairs", "1", "--steps", "1", "--csv", path});
    ASSERT_TRUE(result.status.ok()) << result.output;
    const Table table(path);
    ASSERT_EQ(table.rows.size(), 3U);
    EXPECT_LT(table.number(1, "steady_bytes"), 0.51 * table.number(0, "steady_bytes")) << backend;
    EXPECT_LE(table.number(1, "steady_bytes") + table.number(1, "peak_bytes"),
              table.number(1, "bound_bytes"))
        << backend;
    EXPECT_LT(table.number(1, "bound_bytes"),
              table.number(0, "steady_bytes") + table.number(0, "peak_bytes"))
        << backend;
    // Half of the parameters when all have their values, and until then a unit of them on top.
    const double parameters = table.number(0, "steady_bytes") / 4;
    EXPECT_LT(table.number(2, "steady_bytes"), 0.51 * parameters) << backend;
    EXPECT_LT(table.number(2, "peak_bytes"), 2 * 3159040) << backend;
    EXPECT_LE(table.number(2, "steady_bytes") + table.number(2, "peak_bytes"),
              table.number(2, "bound_bytes"))
        << backend;
    // A block's parameters, of which this rank keeps half.
    EXPECT_THAT(result.output, HasSubstr("unit 'blocks.0': 1579520 of 3159040 bytes kept"));
  }
}

TEST(BenchMemory, NamesWhatItKnows) {
  expect_refused({"memory", "--jobs", "mlp"}, "mlp not in", "gpt");
  expect_refused({"memory", "--modes", "offload"}, "offload not in", "plain,checkpoint");
}

}  // namespace
}  // namespace tessera::testing
