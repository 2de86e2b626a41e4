// How long does it take until a step runs as a program? The gpt of several depths with AdamW, from
// the first call to the first that runs the program: recordings, passes, code and its compilation,
// less what the calls would have taken eagerly; with an empty cache, and in the next process.
// Against torch.compile of the same model.
//
// And what does a program add to its operators? A chain of tiny ones, run as a program, against the
// same ones called in a loop, below autograd.
#include <tessera/compile.h>

#include "compile_ready.h"
#include "numbers.h"
#include "private_cache.h"
#include "statistics.h"
#include "table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::vector<std::string> devices = {"cpu"};
  std::vector<std::string> peers;
  std::vector<int> blocks = {2, 6, 12};
  int repeats = 3;
  int nodes = 1000;
  std::string csv;
  std::string measure;  // of a process that was started for it: eager, compile
};

c10::DeviceType type_of(const std::string& device) {
  return device == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

template <class F>
double seconds(const F& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void tell_ready(const Settings& settings) {
  Table table("compile", settings.csv);
  table.add("job,device,blocks,side,ready_s,cached_s,kernels,eager_ms,compiled_ms");
  std::vector<std::string> sides = {"tessera"};
  sides.insert(sides.end(), settings.peers.begin(), settings.peers.end());
  for (const auto& device : settings.devices) {
    for (const int blocks : settings.blocks) {
      // In turn, so that a busy moment of the machine hits all alike.
      std::vector<ReadyTimes> times(sides.size());
      for (int i = 0; i < settings.repeats; ++i) {
        for (size_t side = 0; side < sides.size(); ++side)
          add_times({type_of(device), blocks, sides[side]}, times[side]);
      }
      for (size_t side = 0; side < sides.size(); ++side) {
        const auto& [cold, cached, eager, compiled, kernels] = times[side];
        char text[160];
        std::snprintf(text, sizeof(text), "gpt,%s,%d,%s,%.2f,%.2f,%ld,%.1f,%.1f", device.c_str(),
                      blocks, sides[side].c_str(), median(cold), median(cached),
                      static_cast<long>(kernels), 1e3 * median(eager), 1e3 * median(compiled));
        table.add(text);
      }
    }
  }
}

/// An operator that is no kernel of ours in this backend.
struct Tiny {
  const char* name;
  const char* backend;
  at::Tensor (*call)(const at::Tensor& x, const at::Tensor& y);
};
constexpr Tiny kTiny[] = {
    {"add", "interpret", [](const at::Tensor& x, const at::Tensor& y) { return at::add(x, y); }},
    {"cumsum", "interpret", [](const at::Tensor& x, const at::Tensor&) { return x.cumsum(0); }},
    {"cumsum", "codegen", [](const at::Tensor& x, const at::Tensor&) { return x.cumsum(0); }},
};

struct NodeTimes {
  std::vector<double> direct, program, overhead;  // microseconds a node
};

NodeTimes measure_nodes(const Tiny& tiny, int nodes) {
  const FreshCache cache;
  const at::NoGradGuard no_grad;
  const auto y = torch::ones({1});
  const auto chain = [&](at::Tensor x) {
    for (int i = 0; i < nodes; ++i) x = tiny.call(x, y);
    return x;
  };
  auto compiled = compile(chain, {.fullgraph = true, .backend = tiny.backend});
  const auto x = torch::zeros({1});
  at::Tensor wanted, got;
  for (int i = 0; i < 4; ++i) got = compiled(x);
  const auto directly = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    wanted = chain(x);
  };
  directly();
  TORCH_CHECK(at::equal(got, wanted), "bench compile: ", tiny.name, " gave ", got, " for ", wanted);
  NodeTimes times;
  constexpr int kPairs = 51;
  for (int i = 0; i < kPairs; ++i) {
    times.direct.push_back(1e6 * seconds(directly) / nodes);
    times.program.push_back(1e6 * seconds([&] { compiled(x); }) / nodes);
    times.overhead.push_back(times.program.back() - times.direct.back());
  }
  return times;
}

void tell_overhead(const Settings& settings) {
  auto path = std::filesystem::path(settings.csv);
  if (!path.empty()) path.replace_filename(path.stem().string() + "-nodes" + ".csv");
  Table table("compile", path);
  table.add("operator,backend,nodes,direct_us,program_us,overhead_us");
  for (const auto& tiny : kTiny) {
    const auto times = measure_nodes(tiny, settings.nodes);
    char text[128];
    std::snprintf(text, sizeof(text), "%s,%s,%d,%.3f,%.3f,%.3f", tiny.name, tiny.backend,
                  settings.nodes, median(times.direct), median(times.program),
                  median(times.overhead));
    table.add(text);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Time until a compiled step runs, by the depth of the model, and what a program adds "
      "to its operators; needs one rank",
      "tessera bench compile");
  Settings settings;
  app.add_option("--device", settings.devices, "where: cpu, cuda or both")
      ->delimiter(',')
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option(
         "--peer", settings.peers,
         "whom to compare with: pytorch, by torch.compile (TESSERA_PYTHON names the Python)")
      ->delimiter(',')
      ->check(CLI::IsMember({"pytorch"}));
  tool::add_numbers(app, "--blocks", settings.blocks, 1, 10'000, "depths of the gpt");
  tool::add_number(app, "--repeats", settings.repeats, 1, 1'000'000,
                   "times each is compiled, cold and from the cache; the median counts");
  tool::add_number(app, "--nodes", settings.nodes, 1, 1'000'000,
                   "operators of the program whose overhead is measured");
  app.add_option("--csv", settings.csv,
                 "also write the tables: to this file, and to one with -nodes in its name");
  app.add_option("--measure", settings.measure)->group("");  // what it starts itself with
  if (const auto code = parse_words(app, argc, argv)) return *code;
  if (std::ranges::count(settings.devices, "cuda") > 0) {
    if (const auto code = refuse_without_gpu(app)) return *code;
  }
  // Started as several ranks, as `tessera bench` does by default: the others would disturb.
  if (is_other_rank()) return 0;
  return run_question("compile", [&] {
    if (!settings.measure.empty())
      return measure_ready(type_of(settings.devices.at(0)), settings.blocks.at(0),
                           settings.measure);
    tell_ready(settings);
    tell_overhead(settings);
  });
}
