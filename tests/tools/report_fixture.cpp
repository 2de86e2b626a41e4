#include "tools/report_fixture.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <random>
#include <sstream>

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kBlocks = 6;
constexpr int kHidden = 256;
constexpr int kTokensPerStep = 8192;

Json config_of(const RunFixture& run) {
  return {{"data", "."},
          {"ranks", run.ranks},
          {"parallel", run.parallel},
          {"blocks", kBlocks},
          {"hidden", kHidden},
          {"heads", 8},
          {"context", 256},
          {"batch", 16},
          {"steps", run.steps},
          {"seed", 1234},
          {"lr", 0.001},
          {"warmup", 40},
          {"weight_decay", 0.1},
          {"clip", 1.0},
          {"precision", "fp32"},
          {"accumulate", 1},
          {"compile", run.is_compiled},
          {"save_every", 100},
          {"checkpoint_activations", "none"}};
}

Json sharding_of(const RunFixture& run) {
  const bool is_sharded = run.parallel == "fully_shard";
  Json rows = Json::array();
  const auto add = [&](const std::string& name, std::vector<int> shape) {
    auto local = shape;
    if (is_sharded) local[0] /= run.ranks;
    std::int64_t bytes = 4;
    for (const int size : local) bytes *= size;
    rows.push_back({{"name", name},
                    {"shape", shape},
                    {"dtype", "float32"},
                    {"placements", is_sharded ? "Shard(0)" : "Replicate()"},
                    {"local_shape", local},
                    {"bytes_per_rank", bytes}});
  };
  add("embedding.weight", {256, kHidden});
  for (int block = 0; block < kBlocks; ++block) {
    const std::string prefix = "blocks." + std::to_string(block) + ".";
    add(prefix + "attention.qkv.weight", {3 * kHidden, kHidden});
    add(prefix + "attention.out.weight", {kHidden, kHidden});
    add(prefix + "mlp.up.weight", {4 * kHidden, kHidden});
    add(prefix + "mlp.down.weight", {kHidden, 4 * kHidden});
  }
  add("norm.weight", {kHidden});
  return rows;
}

Json facts_of(const RunFixture& run) {
  return {{"version", "0.1.0"},
          {"started", "2026-03-14T09:26:53Z"},
          {"command", "tessera train --ranks " + std::to_string(run.ranks) + " --parallel " +
                          run.parallel + (run.is_compiled ? " --compile" : "")},
          {"world_size", run.ranks},
          {"mesh", {{"dim_names", {"dp"}}, {"shape", {run.ranks}}}},
          {"hosts", {"atlas"}},
          {"device", "cpu"},
          {"parameters", 4852992},
          {"dataset", {{"tokens", 3214567}, {"files", 412}}},
          {"sharding", sharding_of(run)}};
}

std::string metrics_of(const RunFixture& run) {
  std::mt19937 random(7);
  std::normal_distribution<double> noise(0, 1);
  std::string lines;
  double seconds = 0;
  const auto write_step = [&](int step) {
    const double progress = static_cast<double>(step) / run.steps;
    const double loss = run.final_loss + (5.54 - run.final_loss) * std::exp(-6 * progress);
    const double speed =
        kTokensPerStep / 0.31 * run.ranks * (step < 4 ? 0.6 : 1 + 0.02 * noise(random));
    seconds += kTokensPerStep * run.ranks / speed;
    const double rate =
        1e-3 * std::min(1.0, step / 40.0) * (0.55 + 0.45 * std::cos(3.14159 * progress));
    lines += Json{{"step", step},
                  {"loss", loss + 0.06 * noise(random)},
                  {"lr", rate},
                  {"grad_norm", 0.6 + 2 * std::exp(-8 * progress) + 0.08 * std::abs(noise(random))},
                  {"tokens", kTokensPerStep * run.ranks},
                  {"tokens_per_s", speed},
                  {"comm_share", 0.07 + 0.012 * std::abs(noise(random))},
                  {"memory_bytes", 8.1e8 + 2.6e7 * std::min(step, 12)},
                  {"seconds", seconds},
                  {"epoch", step / 250}}
                 .dump() +
             "\n";
    if (step % 50 == 0)
      lines += Json{{"step", step},
                    {"val_loss", loss + 0.11},
                    {"val_nats_per_byte", (loss + 0.11) / 2},
                    {"seconds", seconds}}
                   .dump() +
               "\n";
    if (step % 100 == 0)
      lines += Json{{"event", "saved"},
                    {"step", step},
                    {"text", "checkpoints/step-" + std::to_string(step)}}
                   .dump() +
               "\n";
  };
  const int killed_at = run.resumed_at > 0 ? run.resumed_at + 30 : 0;
  for (int step = 1; step <= killed_at; ++step) write_step(step);
  if (run.resumed_at > 0)
    lines += Json{{"event", "resumed"}, {"step", run.resumed_at}}.dump() + "\n";
  for (int step = run.resumed_at + 1; step <= run.steps; ++step) write_step(step);
  return lines;
}

/// One step of each rank; rank 0 is the fastest, and every collective begins with the last.
class TimelineMaker {
 public:
  explicit TimelineMaker(const RunFixture& run) : run_(run), now_(run.ranks, 1e6) {}

  std::string make() {
    for (int rank = 0; rank < run_.ranks; ++rank)
      span(rank, "next batch", "data", 900 + 700.0 * rank);
    for (int rank = 0; rank < run_.ranks; ++rank) forward(rank);
    const auto backward_begin = now_;
    for (int block = kBlocks - 1; block >= 0; --block) {
      for (int rank = 0; rank < run_.ranks; ++rank)
        span(rank, "backward of blocks." + std::to_string(block), "backward", pace(rank, 14'000));
      if (block % 2 == 0) collective("all_reduce bucket " + std::to_string(2 - block / 2));
    }
    for (int rank = 0; rank < run_.ranks; ++rank) {
      add(rank, "backward", "backward", backward_begin[rank], now_[rank]);
      span(rank, "AdamW", "optimizer", 6'300);
    }
    return Json{{"traceEvents", events_}}.dump();
  }

 private:
  static double pace(int rank, double duration) { return duration * (1 + 0.13 * rank); }

  void forward(int rank) {
    const double begin = now_[rank];
    for (int block = 0; block < kBlocks; ++block)
      span(rank, "blocks." + std::to_string(block), "forward", pace(rank, 7'000));
    span(rank, "loss", "forward", 2'500);
    add(rank, "forward", "forward", begin, now_[rank]);
  }

  void collective(const std::string& name) {
    const auto last = std::max_element(now_.begin(), now_.end());
    const double all_here = *last;
    const int last_rank = static_cast<int>(last - now_.begin());
    for (int rank = 0; rank < run_.ranks; ++rank) {
      const double begin = now_[rank];
      if (rank != last_rank && run_.has_named_waits)
        add(rank, "wait for rank " + std::to_string(last_rank), "wait", begin, all_here,
            {{"peer", last_rank}});
      now_[rank] = all_here + 2'400;
      add(rank, name, "communication", begin, now_[rank], {{"bytes", 25 << 20}});
    }
  }

  void span(int rank, const std::string& name, const char* category, double duration) {
    add(rank, name, category, now_[rank], now_[rank] + duration);
    now_[rank] += duration;
  }

  void add(int rank, const std::string& name, const char* category, double begin, double end,
           const Json& arguments = Json::object()) {
    events_.push_back({{"name", name},
                       {"cat", category},
                       {"ph", "X"},
                       {"ts", begin},
                       {"dur", end - begin},
                       {"pid", rank},
                       {"tid", 0},
                       {"args", arguments}});
  }

  RunFixture run_;
  std::vector<double> now_;  // by rank
  Json events_ = Json::array();
};

std::string program_of() {
  std::string text =
      "// The train step of Gpt on 2 ranks: forward, backward and AdamW.\n#include "
      "<tessera/compile/runtime.h>\n\nnamespace {\n\n";
  for (int kernel = 0; kernel < 12; ++kernel) {
    text += "// gelu and its input's bias, one pass\nvoid fused_" + std::to_string(kernel) +
            "(const float* x, const float* bias, float* out, int64_t n) {\n  for (int64_t i = 0; i "
            "< n; "
            "++i) {\n    const float a = x[i] + bias[i % 1024];\n    out[i] = 0.5f * a * (1.0f + "
            "std::erf(a * 0.70710678f));\n  }\n}\n\n";
  }
  return text + "}  // namespace\n";
}

}  // namespace

void write_text(const fs::path& file, const std::string& text) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << text;
}

std::string read_text(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

void write_run(const fs::path& folder, const RunFixture& run) {
  write_text(folder / "config.json", config_of(run).dump(2));
  write_text(folder / "run.json", facts_of(run).dump(2));
  write_text(folder / "metrics.jsonl", metrics_of(run));
  write_text(folder / "sample.txt",
             "The ranks meet at the store,\nand each has its own part of the data.");
  if (run.has_timeline) write_text(folder / "timeline.json", TimelineMaker(run).make());
  if (run.is_compiled) write_text(folder / "program.cpp", program_of());
}

}  // namespace tessera::test
