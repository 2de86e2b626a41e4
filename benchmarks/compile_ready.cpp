#include "compile_ready.h"

#include <tessera/autocast.h>
#include <tessera/compile.h>
#include <tessera/optim.h>

#include "jobs.h"
#include "private_cache.h"
#include "statistics.h"
#include "train_peer_job.h"

#include <nlohmann/json.hpp>
#include <poll.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <optional>

namespace tessera::benchmarks {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int kSteps = 5;  // timed once it is warm, the median counts
constexpr std::chrono::minutes kPatience{10};

std::string name_of(c10::DeviceType device) {
  return c10::DeviceTypeName(device, /*lower_case=*/true);
}

std::vector<std::string> command_of(const ReadyCase& wanted, const std::string& how) {
  if (wanted.side == "pytorch") {
    return {peer_python(), TESSERA_PEERS "/compile.py",   "--device", name_of(wanted.device),
            "--blocks",    std::to_string(wanted.blocks), "--how",    how};
  }
  return {std::filesystem::read_symlink("/proc/self/exe"),
          "--measure",
          how,
          "--device",
          name_of(wanted.device),
          "--blocks",
          std::to_string(wanted.blocks)};
}

/// What a process answers whose caches are in that folder.
json ask(const ReadyCase& wanted, const std::string& how, const std::string& folder) {
  PeerProcess process(command_of(wanted, how), {{"TESSERA_CACHE", folder},
                                                {"TORCHINDUCTOR_CACHE_DIR", folder},
                                                {"TRITON_CACHE_DIR", folder + "/triton"},
                                                {"OMP_NUM_THREADS", "1"},
                                                {"PYTHONDONTWRITEBYTECODE", "1"}});
  const auto deadline = Clock::now() + kPatience;
  std::string line;
  while (true) {
    const auto received = process.receive(line);
    if (received == PeerProcess::Received::Line) return json::parse(line);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const bool has_ended = received == PeerProcess::Received::End;
    TORCH_CHECK(!has_ended && left > 0, "bench compile: expected an answer of ", wanted.side,
                " for a gpt of ", wanted.blocks, " blocks on ", name_of(wanted.device), " (", how,
                "), but its process ",
                has_ended ? "ended with " + process.end() : "said nothing for 10 minutes",
                "; its last words:\n", process.last_words());
    pollfd waiting{.fd = process.descriptor(), .events = POLLIN, .revents = 0};
    poll(&waiting, 1, static_cast<int>(left));
  }
}

/// Runs steps of a gpt, one after the other, and tells how long.
class Steps {
 public:
  Steps(c10::DeviceType device, int blocks)
      : job_(make_brief_gpt(blocks, device)),
        optimizer_(job_.model->parameters(), {.fused = true}) {}

  at::Tensor step() {
    std::optional<Autocast> autocast;
    if (job_.device.is_cuda()) autocast.emplace(at::kCUDA, AutocastOptions{.dtype = at::kBFloat16});
    auto loss = job_.loss(job_.forward());
    autocast.reset();
    loss.backward();
    optimizer_.step();
    optimizer_.zero_grad();
    return loss;
  }

  template <class F>
  double seconds(const F& work) const {
    wait();
    const auto start = Clock::now();
    work();
    wait();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  template <class F>
  double median_of(const F& step) const {
    std::vector<double> times;
    for (int i = 0; i < kSteps; ++i) times.push_back(seconds(step));
    return median(times);
  }

  CompileOptions options() { return {.module = *job_.model, .optimizer = optimizer_}; }

 private:
  void wait() const {
    if (job_.device.is_cuda()) torch::cuda::synchronize();
  }

  Job job_;
  optim::AdamW optimizer_;
};

json measure_eager(Steps& steps) {
  const double first = steps.seconds([&] { steps.step(); });
  return {{"first", first}, {"eager", steps.median_of([&] { steps.step(); })}};
}

json measure_compiled(Steps& steps) {
  auto compiled = compile([&] { return steps.step(); }, steps.options());
  constexpr int kMostCalls = 6;
  int calls = 0;
  const double total = steps.seconds([&] {
    for (; counters()["graphs"] == 0 && calls < kMostCalls; ++calls) compiled();
    compiled();
    ++calls;
  });
  TORCH_CHECK(counters()["graphs"] == 1, "bench compile: expected a program after ", kMostCalls,
              " calls, got:\n", explain(compiled));
  return {{"total", total},
          {"calls", calls},
          {"kernels", counters()["distinct_kernels"]},
          {"compiled", steps.median_of([&] { compiled(); })}};
}

}  // namespace

void add_times(const ReadyCase& wanted, ReadyTimes& times) {
  // Eager steps may keep kernels, too, which are not to be there for those that compile.
  const FreshCache of_eager, of_compiled;
  for (auto* ready : {&times.cold, &times.cached}) {
    const auto eager = ask(wanted, "eager", of_eager.path());
    const auto compiled = ask(wanted, "compile", of_compiled.path());
    const double step = eager.at("eager");
    ready->push_back(compiled.at("total").get<double>() - eager.at("first").get<double>() -
                     (compiled.at("calls").get<int>() - 1) * step);
    times.eager.push_back(step);
    times.compiled.push_back(compiled.at("compiled"));
    // From its cache PyTorch makes none.
    times.kernels = std::max(times.kernels, compiled.at("kernels").get<int64_t>());
  }
}

void measure_ready(c10::DeviceType device, int blocks, const std::string& how) {
  Steps steps(device, blocks);
  std::cout << (how == "eager" ? measure_eager(steps) : measure_compiled(steps)).dump()
            << std::endl;
}

}  // namespace tessera::benchmarks
