// The model and the job of `tessera train` against the same in PyTorch,
// benchmarks/peers/train_gpt.py.
#include "support/peer.h"

#include <tessera/serialize.h>

#include "train/model.h"
#include "train/train_run.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr train::ModelShape kShape{
    .vocabulary = 256, .blocks = 2, .width = 32, .heads = 2, .context = 16};

const std::string kImport = R"py(
import json, os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, os.environ["PEERS"])
import train_gpt
)py";

const std::string kModel = kImport + R"py(
torch.manual_seed(7)
model = train_gpt.Gpt(blocks=2, width=32, heads=2, context=16)
)py";

const std::string kTrain = kImport + R"py(
import io
sys.argv = ["train_gpt.py", *json.loads(os.environ["WORDS"])]
init_process_group()
metrics = io.StringIO()
try:
    train_gpt.Trainer(train_gpt.parse_options()).run(metrics)
except ImportError as error:
    outputs["missing"] = torch.tensor(1)
lines = [json.loads(line) for line in metrics.getvalue().splitlines()]
steps = [line for line in lines if "loss" in line]
for name in ("loss", "lr", "grad_norm", "tokens", "epoch"):
    outputs[name] = torch.tensor([float(line[name]) for line in steps], dtype=torch.double)
for name in ("val_loss", "val_nats_per_byte"):
    outputs[name] = torch.tensor([line[name] for line in lines if name in line], dtype=torch.double)
)py";

train::Gpt make_model(uint64_t seed) {
  torch::manual_seed(seed);
  return train::Gpt(kShape);
}

TEST(TrainPeer, ModelsStartFromTheSameValues) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto peer = run_peer(kModel + "outputs.update(model.state_dict())\n", {},
                             {.environment = {{"PEERS", TESSERA_PEERS}}});
  ASSERT_TRUE(peer.ok());
  const auto ours = make_model(7)->named_parameters();
  EXPECT_EQ(ours.size(), peer.tensors.size());
  for (const auto& parameter : ours) {
    ASSERT_TRUE(peer.tensors.contains(parameter.key())) << parameter.key();
    EXPECT_TRUE(at::equal(parameter.value(), peer[parameter.key()])) << parameter.key();
  }
}

TEST(TrainPeer, WeightsSavedFromPyTorchLoad) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const TemporaryFolder folder;
  const auto file = (folder.path() / "model.safetensors").string();
  torch::manual_seed(11);
  const auto tokens = torch::randint(256, {3, 16});
  const auto peer =
      run_peer(kModel + R"py(
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    outputs["logits"] = model(inputs["tokens"])
try:
    from safetensors.torch import save_file
    save_file(model.state_dict(), os.environ["FILE"])
except ImportError as error:
    print(error)
)py",
               {{"tokens", tokens}}, {.environment = {{"PEERS", TESSERA_PEERS}, {"FILE", file}}});
  ASSERT_TRUE(peer.ok());
  if (!fs::exists(file)) GTEST_SKIP() << "no Python package safetensors: " << peer.output;
  auto model = make_model(1);
  import_safetensors(file, model);
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::allclose(model(tokens), peer["logits"], /*rtol=*/1e-5, /*atol=*/1e-5));
}

struct Case {
  const char* name;
  const char* ours;
  const char* peers;
  Words further = {};
  double tolerance = 1e-5;  // of losses; norms of gradients have ten times as much

  bool has(const std::string& word) const { return std::ranges::count(further, word) > 0; }
};
void PrintTo(const Case& which, std::ostream* out) { *out << which.name; }  // NOLINT: gtest's name

/// A folder as people have them: order by path matters, and not all of it is text.
fs::path make_texts(const fs::path& folder) {
  const auto write = [&](const std::string& name, const std::string& text) {
    fs::create_directories((folder / name).parent_path());
    std::ofstream(folder / name, std::ios::binary) << text;
  };
  std::string text;
  for (int i = 0; i < 12; ++i) text += "line " + std::to_string(i * i) + " of a text\n";
  write("b.txt", text);
  write("b/first.txt", "Sorted by its path, behind b.txt.\n" + text);
  write("a-\xC3\xA4.txt",
        "Gr\xC3\xBC\xC3\x9F"
        "e\n");
  write("B.md", "Capitals come first.\n");
  write("picture.bin", std::string("\x89PNG\0\0", 6));
  write("empty.txt", "");
  write(".hidden/secret.txt", "not this\n");
  write("build/output.txt", "nor this\n");
  return folder;
}

class TrainPeerJob : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    PyTorch, TrainPeerJob,
    ::testing::Values(
        Case{"Ddp", "replicate", "ddp"}, Case{"Fsdp2", "fully_shard", "fsdp2"},
        Case{"DdpAccumulating", "replicate", "ddp", {"--accumulate", "2", "--clip", "0"}},
        Case{"Fsdp2Accumulating", "fully_shard", "fsdp2", {"--accumulate", "2"}},
        Case{"AllOfTheText", "replicate", "ddp", {"--validation", "0", "--seed", "5"}},
        Case{"Muon", "replicate", "ddp", {"--optimizer", "muon"}},
        // It is iterated in bfloat16, by products of shards there and of whole matrices here.
        Case{"MuonSharded", "fully_shard", "fsdp2", {"--optimizer", "muon"}, /*tolerance=*/1e-3},
        Case{"MainJob",
             "replicate",
             "ddp",
             {"--optimizer", "muon", "--precision", "bf16", "--tokenizer",
              TESSERA_SOURCE_DIR "/tools/train/text/tokenizer.json", "--validation-data",
              TESSERA_SOURCE_DIR "/LICENSE"},
             /*tolerance=*/1e-3}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(TrainPeerJob, HasTheSameLossesStepByStep) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto& which = GetParam();
  const TrainingGround ground;
  Words words = {"--data",    make_texts(ground.path() / "texts"),
                 "--blocks",  "2",
                 "--width",   "32",
                 "--heads",   "2",
                 "--context", "16",
                 "--batch",   "8",
                 "--warmup",  "3",
                 "--steps",   "8",
                 "--lr",      "1e-2"};
  words.insert(words.end(), which.further.begin(), which.further.end());
  auto peer_words = words;
  for (const char* word : {"--parallel", which.peers, "--run", "none"}) peer_words.push_back(word);
  const bool is_validated = !which.has("--validation");
  if (is_validated) peer_words.emplace_back("--final-validation");
  const auto peers = run_peers(
      2, kTrain, {},
      {.environment = {{"PEERS", TESSERA_PEERS}, {"WORDS", nlohmann::json(peer_words).dump()}}});
  ASSERT_TRUE(peers[0].ok() && peers[1].ok());
  if (peers[0].tensors.contains("missing")) GTEST_SKIP() << "no Python package tokenizers";

  Words command = {TESSERA_TOOL, "train"};
  command.insert(command.end(), words.begin(), words.end());
  for (const char* word : {"--parallel", which.ours, "--run", "ours", "--sample", "0"})
    command.push_back(word);
  const auto result = ground.call(command);
  ASSERT_TRUE(result.status.ok()) << result.output;

  const auto number = [&](const char* field, int64_t step) {
    return peers[0][field][step].item<double>();
  };
  std::istringstream lines(ground.read("ours", "metrics.jsonl"));
  int64_t step = 0, validated = 0;
  for (std::string text; std::getline(lines, text);) {
    const auto line = nlohmann::json::parse(text);
    for (const char* name : {"val_loss", "val_nats_per_byte"}) {
      if (!line.contains(name)) continue;
      EXPECT_NEAR(line[name].get<double>(), number(name, 0), which.tolerance * number(name, 0));
      ++validated;
    }
    if (!line.contains("loss")) continue;
    SCOPED_TRACE("step " + std::to_string(step + 1));
    ASSERT_LT(step, peers[0]["loss"].numel());
    EXPECT_NEAR(line["loss"].get<double>(), number("loss", step),
                which.tolerance * number("loss", step));
    EXPECT_NEAR(line["grad_norm"].get<double>(), number("grad_norm", step),
                10 * which.tolerance * number("grad_norm", step));
    EXPECT_DOUBLE_EQ(line["lr"].get<double>(), number("lr", step));
    EXPECT_EQ(line["tokens"].get<double>(), number("tokens", step));
    EXPECT_EQ(line["epoch"].get<double>(), number("epoch", step));
    ++step;
  }
  EXPECT_EQ(step, 8);
  EXPECT_EQ(validated, is_validated ? 2 : 0);
  EXPECT_GE(number("epoch", 7), 1) << "the text should have been read more than once";
}

TEST(TrainPeer, BenchmarkComparesLosses) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const TrainingGround ground;
  const auto table = ground.path() / "job.csv";
  const auto texts = make_texts(ground.path() / "texts");
  const auto result = ground.call({"python3",
                                   TESSERA_PEERS "/../job.py",
                                   "--tool",
                                   TESSERA_TOOL,
                                   "--modes",
                                   "replicate",
                                   "--pairs",
                                   "0",
                                   "--loss-steps",
                                   "2",
                                   "--data",
                                   texts,
                                   "--csv",
                                   table,
                                   "--",
                                   "--blocks",
                                   "1",
                                   "--width",
                                   "32",
                                   "--context",
                                   "16",
                                   "--tokenizer",
                                   "bytes"});
  ASSERT_TRUE(result.status.ok()) << result.output;
  std::ifstream file(table);
  std::string columns, largest, mean, last;
  std::getline(file, columns);
  EXPECT_EQ(columns, "row,ranks,tessera,peer,peer_value,ratio,low,high");
  EXPECT_TRUE(std::getline(file, largest) && std::getline(file, mean) && std::getline(file, last));
  EXPECT_TRUE(last.starts_with("loss replicate after 2 steps,2,5.")) << last;
  EXPECT_TRUE(fs::exists(ground.path() / "job.machine.txt"));
}

TEST(TrainPeer, BenchmarkRefusesWhatItDoesNotKnow) {
  const TrainingGround ground;
  const auto result =
      ground.call({"python3", TESSERA_PEERS "/../job.py", "--modes", "fully_shared"});
  EXPECT_EQ(result.status.code, 2);
  EXPECT_NE(result.output.find("expected modes of replicate, fully_shard, got fully_shared"),
            std::string::npos)
      << result.output;
}

}  // namespace
}  // namespace tessera::testing
