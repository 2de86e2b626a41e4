// How long does it take until a step runs as a program? The gpt of several depths with AdamW, from
// the first call to the first that runs the program: recordings, passes, code and its compilation,
// less what the calls would have taken as they are. Kernels are compiled anew, in a folder of their
// own.
//
// And what does a program add to its operators? A chain of tiny ones, run as a program, against the
// same ones called in a loop, below autograd.
#include <tessera/compile.h>
#include <tessera/optim.h>

#include "jobs.h"
#include "numbers.h"
#include "statistics.h"
#include "table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::vector<int> blocks = {6, 12, 24, 48};
  int repeats = 3;
  int nodes = 1000;
  std::string csv;
};

/// An empty folder for kernels, while it lives.
class FreshCache {
 public:
  FreshCache() {
    auto name = (std::filesystem::temp_directory_path() / "tessera-bench-XXXXXX").string();
    TORCH_CHECK(mkdtemp(name.data()) != nullptr, "bench compile: no folder like ", name,
                " could be made; set TMPDIR to one that can be written");
    path_ = name;
    setenv("TESSERA_CACHE", name.c_str(), /*overwrite=*/1);
  }
  ~FreshCache() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  FreshCache(const FreshCache&) = delete;
  FreshCache& operator=(const FreshCache&) = delete;

 private:
  std::filesystem::path path_;
};

template <class F>
double seconds(const F& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Times {
  double ready;  // until a program runs, without the steps themselves
  double eager, compiled;
};

Times measure(int blocks) {
  const FreshCache cache;
  auto job = make_gpt(/*rank=*/0, blocks);
  optim::AdamW optimizer(job.model->parameters(), {.fused = true});
  const auto step = [&] {
    auto loss = job.loss(job.forward());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  };
  step();
  const double eager = seconds(step);
  counters().clear();
  auto compiled = compile(step, {.module = *job.model, .optimizer = optimizer});
  constexpr int kMostCalls = 6;
  int calls = 0;
  const double until_ready = seconds([&] {
    while (counters()["graphs"] == 0 && calls++ < kMostCalls) compiled();
  });
  TORCH_CHECK(counters()["graphs"] == 1, "bench compile: expected a program after ", kMostCalls,
              " calls, got:\n", explain(compiled));
  compiled();
  return {until_ready - calls * eager, eager, seconds([&] { compiled(); })};
}

void tell_ready(const Settings& settings) {
  Table table("compile", settings.csv);
  table.add("job,blocks,ready_s,ready_s_per_block,eager_ms,compiled_ms");
  for (const int blocks : settings.blocks) {
    std::vector<double> ready, eager, compiled;
    for (int i = 0; i < settings.repeats; ++i) {
      const auto times = measure(blocks);
      ready.push_back(times.ready);
      eager.push_back(times.eager);
      compiled.push_back(times.compiled);
    }
    char text[128];
    std::snprintf(text, sizeof(text), "gpt,%d,%.2f,%.3f,%.1f,%.1f", blocks, median(ready),
                  median(ready) / blocks, 1e3 * median(eager), 1e3 * median(compiled));
    table.add(text);
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
  tool::add_numbers(app, "--blocks", settings.blocks, 1, 10'000, "depths of the gpt");
  tool::add_number(app, "--repeats", settings.repeats, 1, 1'000'000,
                   "times each is compiled; the median counts");
  tool::add_number(app, "--nodes", settings.nodes, 1, 1'000'000,
                   "operators of the program whose overhead is measured");
  app.add_option("--csv", settings.csv,
                 "also write the tables: to this file, and to one with -nodes in its name");
  if (const auto code = parse_words(app, argc, argv)) return *code;
  // Started as several ranks, as `tessera bench` does by default: the others would disturb.
  if (is_other_rank()) return 0;
  return run_question("compile", [&] {
    tell_ready(settings);
    tell_overhead(settings);
  });
}
