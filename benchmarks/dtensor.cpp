// What does being distributed cost? Operators on distributed tensors of a mesh of one rank, where
// nothing travels, against the same on plain ones; and PyTorch's DTensor in the same run. With
// several ranks also a redistribute against the bare collective that it needs.
#include <tessera/comm.h>
#include <tessera/dtensor.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "dtensor_redistribute.h"
#include "numbers.h"
#include "statistics.h"
#include "table.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;
using Call = std::function<void()>;

struct Settings {
  int repeats = 15;
  double milliseconds = 20;
  std::string peer;
  std::string csv;
  bool list = false;
};

constexpr int64_t kRedistributedBytes = int64_t{64} << 20;

struct Row {
  std::string name;
  bool without_grad;
  Call plain, tessera;
};

torch::nn::Sequential layers(const DeviceMesh* mesh) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::ReLU(), torch::nn::Linear(8, 8));
  if (mesh != nullptr) {
    for (auto& parameter : model->parameters()) distribute_tensor_(parameter, *mesh, {Shard(0)});
  }
  return model;
}

Call training(const at::Tensor& x, const DeviceMesh* mesh) {
  auto model = layers(mesh);
  return [model, x]() mutable {
    model->forward(x).sum().backward();
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  };
}

Call optimizing(const at::Tensor& x, const DeviceMesh* mesh) {
  auto model = layers(mesh);
  auto optimizer = std::make_shared<optim::Adam>(model->parameters(),
                                                 optim::AdamOptions{.lr = 1e-3, .foreach = true});
  model->forward(x).sum().backward();
  return [optimizer, model] { optimizer->step(); };
}

std::vector<Row> make_rows(const DeviceMesh& mesh) {
  const auto plain = torch::ones({8, 8});
  const DTensor sharded = DTensor::from_local(plain, mesh, {Shard(0)});
  const auto both = [&](const char* name, at::Tensor (*f)(const at::Tensor&)) {
    return Row{name, true, [=] { f(plain); }, [=] { f(sharded); }};
  };
  using T = at::Tensor;
  return {both("add", [](const T& x) { return x + x; }),
          both("relu", [](const T& x) { return x.relu(); }),
          both("mm", [](const T& x) { return x.mm(x); }),
          both("view", [](const T& x) { return x.view({8, 2, 4}); }),
          both("detach", [](const T& x) { return x.detach(); }),
          both("sum", [](const T& x) { return x.sum(); }),
          {"from_local", false, [] {}, [=] { DTensor::from_local(plain, mesh, {Shard(0)}); }},
          {"to_local", false, [] {}, [=] { sharded.to_local(); }},
          {"two layers, forward and backward", false, training(plain, nullptr),
           training(sharded, &mesh)},
          {"Adam step", false, optimizing(plain, nullptr), optimizing(sharded, &mesh)}};
}

double microseconds(const Call& call, int64_t count) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < count; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
         static_cast<double>(count);
}

struct Times {
  double plain, distributed;
};

Times measure(const Row& row, const Settings& settings) {
  const torch::AutoGradMode grad_mode(!row.without_grad);
  microseconds(row.tessera, 20);
  const auto count = std::max<int64_t>(
      3, static_cast<int64_t>(settings.milliseconds * 1e3 / microseconds(row.tessera, 10)));
  std::vector<double> plain, distributed;
  for (int i = 0; i < settings.repeats; ++i) {
    plain.push_back(microseconds(row.plain, count));
    distributed.push_back(microseconds(row.tessera, count));
  }
  return {median(plain), median(distributed)};
}

/// Row -> overhead in microseconds; empty if no peer is asked for.
nlohmann::json run_peer(const Settings& settings) {
  if (settings.peer.empty()) return {};
  const std::string command = std::string(TESSERA_PYTHON) + " " + TESSERA_PEERS + "/dtensor.py " +
                              std::to_string(settings.milliseconds / 1e3) + " 2>/dev/null";
  std::string output;
  auto* pipe = popen(command.c_str(), "r");
  TORCH_CHECK(pipe != nullptr, "bench dtensor: can't start ", command);
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, pipe))
    output.append(buffer, count);
  TORCH_CHECK(pclose(pipe) == 0, "bench dtensor: the peer failed: ", command);
  return nlohmann::json::parse(output);
}

std::string line_of(const Row& row, const Times& ours, const nlohmann::json& first,
                    const nlohmann::json& second) {
  const double overhead = ours.distributed - ours.plain;
  char text[256];
  std::snprintf(text, sizeof text, "\"%s\",%.3f,%.3f,%.3f", row.name.c_str(), ours.plain,
                ours.distributed, overhead);
  std::string line = text;
  if (first.is_null()) return line + ",,";
  const auto peer = [&](const nlohmann::json& run) {
    return run[row.name][1].get<double>() - run[row.name][0].get<double>();
  };
  // The better of the peer's two runs, before and after ours.
  const double peer_overhead = std::min(peer(first), peer(second));
  std::snprintf(text, sizeof text, ",%.3f,%.1f", peer_overhead, peer_overhead / overhead);
  return line + text;
}

std::string redistribute_name() {
  return "redistribute S(0) to S(1) against all_to_all, 64 MiB on " + std::to_string(world_size()) +
         " ranks";
}

/// By all ranks; empty if there is only one.
std::string redistribute_line(const Settings& settings) {
  if (world_size() == 1) return "";
  if (settings.list) return redistribute_name();
  const auto times = time_redistribute(kRedistributedBytes, settings.repeats);
  char text[256];
  std::snprintf(text, sizeof text, "\"%s\",%.3f,%.3f,%.3f,,", redistribute_name().c_str(),
                times.all_to_all_us, times.redistribute_us,
                times.redistribute_us - times.all_to_all_us);
  return text;
}

/// By one process, in a world of its own.
void run_alone(const Settings& settings, const std::string& last_line) {
  for (const auto* name : {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "RANK", "WORLD_SIZE"})
    unsetenv(name);
  init();
  const auto rows = make_rows(init_device_mesh(torch::kCPU, {1}));
  if (settings.list) {
    for (const auto& row : rows) std::cout << row.name << '\n';
    std::cout << last_line << '\n';
    return;
  }
  const auto before = run_peer(settings);
  std::vector<Times> times;
  for (const auto& row : rows) {
    std::cerr << "bench dtensor: " << row.name << '\n';
    times.push_back(measure(row, settings));
  }
  const auto after = run_peer(settings);
  Table table("dtensor", settings.csv);
  table.add("row,plain_us,tessera_us,overhead_us,peer_overhead_us,ratio");
  for (size_t i = 0; i < rows.size(); ++i) table.add(line_of(rows[i], times[i], before, after));
  if (!last_line.empty()) table.add(last_line);
}

void run(const Settings& settings) {
  init();
  const auto line = redistribute_line(settings);
  shutdown();
  if (!is_other_rank()) run_alone(settings, line);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Operators on distributed tensors against plain ones, on one rank; the last row, with "
      "several "
      "ranks: a redistribute from Shard(0) to Shard(1) (tessera_us) against an all-to-all of the "
      "same bytes (plain_us)",
      "tessera bench dtensor");
  Settings settings;
  show_ranks(app);
  tool::add_number(app, "--repeats", settings.repeats, 1, 1'000'000,
                   "timed pairs; the median counts");
  tool::add_number(app, "--milliseconds", settings.milliseconds, 1e-3, 1e6, "of each timed loop");
  app.add_option("--peer", settings.peer, "pytorch: its DTensor, in the same run")
      ->check(CLI::IsMember({"pytorch"}));
  app.add_option("--csv", settings.csv, "also write the table to this file");
  app.add_flag("--list", settings.list, "print the rows and stop");
  if (const auto code = parse_words(app, argc, argv)) return *code;
  return run_question("dtensor", [&] { run(settings); });
}
