// How long does a checkpoint take, against dd and memcpy of the same bytes in the same run?
#include <tessera/tessera.h>

#include "numbers.h"
#include "statistics.h"
#include "table.h"

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct Settings {
  int64_t megabytes = 400;
  std::string folder = "build/bench-save";
  int repeats = 7;
  std::string csv;
};

constexpr int64_t kWidth = 2048;  // a layer of 16 MiB and a little

/// Linear layers of at least so many megabytes, sharded over the ranks or the same on all.
torch::nn::Sequential make_model(int64_t megabytes, bool is_sharded) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  constexpr int64_t kLayerBytes = kWidth * (kWidth + 1) * 4;
  const auto layers = (megabytes * 1'000'000 + kLayerBytes - 1) / kLayerBytes;
  for (int64_t i = 0; i < layers; ++i) {
    nn::Linear layer(kWidth, kWidth);
    if (is_sharded) fully_shard(layer);
    model->push_back(layer);
  }
  return model;
}

double seconds_of(const std::function<void()>& work) {
  barrier();
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Of the slowest rank.
double slowest(double seconds) {
  return all_reduce(at::full({1}, seconds, at::kDouble), ReduceOp::MAX).item<double>();
}

/// Every rank its share, all at once.
double time_dd(const fs::path& folder, int64_t bytes) {
  const auto file = folder / ("dd-" + std::to_string(rank()));
  const auto command = "dd if=/dev/zero of='" + file.string() +
                       "' bs=1M count=" + std::to_string(bytes / world_size() >> 20) +
                       " conv=fsync 2>/dev/null";
  const double seconds = slowest(seconds_of([&] {
    TORCH_CHECK(std::system(command.c_str()) == 0, "bench save: could not run dd in ",
                folder.string());
  }));
  fs::remove(file);
  return seconds;
}

double time_save(const fs::path& folder, const torch::nn::Sequential& model, int repeat) {
  const auto dir = folder / ("step-" + std::to_string(repeat));
  const double seconds = slowest(seconds_of([&] { save(dir.string(), model); }));
  barrier();
  if (rank() == 0) fs::remove_all(dir);
  return seconds;
}

/// How long training waits.
double time_save_async(const fs::path& folder, const torch::nn::Sequential& model) {
  PendingSave pending;
  const double seconds =
      slowest(seconds_of([&] { pending = save_async((folder / "async").string(), model); }));
  pending.wait();
  return seconds;
}

/// This rank's share of the model into memory that has been used before.
double time_memcpy(int64_t bytes) {
  static std::optional<std::pair<at::Tensor, at::Tensor>> memory;
  const auto share = bytes / world_size();
  if (!memory) memory.emplace(at::ones({share}, at::kByte), at::zeros({share}, at::kByte));
  return slowest(seconds_of([&] {
    std::memcpy(memory->second.data_ptr(), memory->first.data_ptr(), static_cast<size_t>(share));
  }));
}

double time_load(const fs::path& dir, const torch::nn::Sequential& model) {
  return slowest(seconds_of([&] { load(dir.string(), model); }));
}

void check(const fs::path& folder, const torch::nn::Sequential& model, bool is_sharded) {
  const auto dir = (folder / "check").string();
  save(dir, model);
  const auto parameter = model->parameters().back();
  const auto before = is_dtensor(parameter) ? DTensor::of(parameter.detach()).full_tensor().clone()
                                            : parameter.detach().clone();
  {
    const at::NoGradGuard no_grad;
    parameter.zero_();
  }
  load(dir, model);
  const auto after =
      is_dtensor(parameter) ? DTensor::of(parameter.detach()).full_tensor() : parameter.detach();
  TORCH_CHECK(at::equal(before, after), "bench save: what was loaded is not what was saved");
}

class SaveTable {
 public:
  explicit SaveTable(const std::string& path) {
    if (rank() == 0) table_.emplace("save", path);
    add("row,bytes,ranks,tessera_ms,peer_ms,ratio");
  }
  void add(const std::string& line) {
    if (table_) table_->add(line);
  }
  /// `ratio`: of speeds for what is to be fast, of times for what holds training up.
  void add(const std::string& row, int64_t bytes, const std::vector<double>& own,
           const std::vector<double>& peer, bool of_times) {
    const double ours = median(own);
    const double theirs = median(peer);
    char text[256];
    std::snprintf(text, sizeof(text), "%s,%ld,%d,%.1f,%.1f,%.2f", row.c_str(),
                  static_cast<long>(bytes), world_size(), ours * 1e3, theirs * 1e3,
                  of_times ? ours / theirs : theirs / ours);
    add(text);
  }

 private:
  std::optional<Table> table_;
};

void measure(const Settings& settings, bool is_sharded, SaveTable& table) {
  const fs::path folder = settings.folder;
  const auto model = make_model(settings.megabytes, is_sharded);
  int64_t bytes = 0;
  for (const auto& parameter : model->parameters()) bytes += parameter.numel() * 4;
  check(folder, model, is_sharded);
  std::vector<double> dd, saved, copied, held;
  for (int repeat = 0; repeat <= settings.repeats; ++repeat) {
    const double times[] = {time_dd(folder, bytes), time_save(folder, model, repeat),
                            time_memcpy(bytes), time_save_async(folder, model)};
    if (repeat == 0) continue;  // only warms up
    dd.push_back(times[0]);
    saved.push_back(times[1]);
    copied.push_back(times[2]);
    held.push_back(times[3]);
  }
  const std::string layout = is_sharded ? "fully sharded" : "replicated";
  table.add("save " + layout + " / dd", bytes, saved, dd, /*of_times=*/false);
  table.add("save_async " + layout + " / memcpy", bytes, held, copied, /*of_times=*/true);
  std::vector<double> loaded;
  for (int repeat = 0; repeat < 3; ++repeat) loaded.push_back(time_load(folder / "check", model));
  table.add("load " + layout + " / memcpy", bytes, loaded, copied, /*of_times=*/true);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Checkpoints of a model against dd, and what save_async holds training up for against memcpy",
      "tessera bench save");
  Settings settings;
  bool list = false;
  show_ranks(app);
  tool::add_number(app, "--megabytes", settings.megabytes, 1, 1'000'000, "size of the model");
  app.add_option("--folder", settings.folder, "where to write; removed afterwards")
      ->capture_default_str();
  tool::add_number(app, "--repeats", settings.repeats, 1, 1'000'000,
                   "timed runs; the median counts");
  app.add_option("--csv", settings.csv, "also write the table to this file");
  app.add_flag("--list", list, "print the rows and stop");
  if (const auto code = parse_words(app, argc, argv)) return *code;
  if (list) {
    if (!is_other_rank()) std::printf("save / dd\nsave_async / memcpy\nload / memcpy\n");
    return 0;
  }
  return run_question("save", [&] {
    init();
    const bool is_ours = fs::create_directories(settings.folder);
    SaveTable table(settings.csv);
    for (const bool is_sharded : {true, false}) measure(settings, is_sharded, table);
    barrier();
    if (is_ours) fs::remove_all(settings.folder);
    shutdown();
  });
}
