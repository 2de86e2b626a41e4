#include "memory_sides.h"

#include <tessera/checkpoint.h>
#include <tessera/comm.h>
#include <tessera/nn/services.h>

#include "counted_memory.h"
#include "rank0.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

struct Mode {
  const char* name;
  double bound;
  void (*apply)(torch::nn::Module& block);
};
const Mode kModes[] = {
    {"plain", 0, [](torch::nn::Module& /*block*/) {}},
    {"checkpoint", 0.3, [](torch::nn::Module& block) { checkpoint(block); }},
};

const Mode& mode_of(const std::string& name) {
  for (const auto& mode : kModes) {
    if (name == mode.name) return mode;
  }
  TORCH_CHECK_VALUE(false, "bench memory: expected a mode of --list, got '", name, "'");
}

Job make_in_mode(const std::string& name, const std::string& mode, int blocks) {
  TORCH_CHECK_VALUE(name == "gpt", "bench memory: expected a job of --list, got '", name, "'");
  auto job = make_gpt(rank(), blocks);
  for (int i = 0; i < blocks; ++i)
    mode_of(mode).apply(*get_submodule(*job.model, "blocks." + std::to_string(i)));
  return job;
}

/// The largest of the ranks' numbers, on every rank.
template <class Number>
Number largest(Number mine) {
  std::string bytes(sizeof(mine), '\0');
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  for (const auto& answer : gather_bytes(bytes)) {
    Number other{};
    std::memcpy(&other, answer.data(), sizeof(other));
    mine = std::max(mine, other);
  }
  return mine;
}

}  // namespace

std::vector<std::string> memory_job_names() { return {"gpt"}; }

std::vector<std::string> memory_mode_names() {
  std::vector<std::string> names;
  for (const auto& mode : kModes) names.emplace_back(mode.name);
  return names;
}

double bound_of(const std::string& mode) { return mode_of(mode).bound; }

MemorySide::MemorySide(const std::string& job, const std::string& mode, int blocks)
    : job_(make_in_mode(job, mode, blocks)),
      optimizer_(job_.model->parameters(), {.lr = 1e-3, .fused = true}) {}

// Gradients keep their memory between steps: it would count as activations otherwise.
void MemorySide::forward_backward() {
  optimizer_.zero_grad(/*set_to_none=*/false);
  job_.loss(job_.forward()).backward();
}

void MemorySide::step() {
  forward_backward();
  optimizer_.step();
}

double MemorySide::time_block(int steps) {
  step();
  barrier();
  const auto start = Clock::now();
  for (int i = 0; i < steps; ++i) step();
  return largest(std::chrono::duration<double>(Clock::now() - start).count()) / steps;
}

MemoryUse MemorySide::measure(const std::string& job, const std::string& mode, int blocks) {
  CountedMemory memory;
  const auto before = memory.live();
  MemorySide side(job, mode, blocks);
  side.step();
  const auto steady = memory.live();
  memory.restart_peak();
  side.forward_backward();
  return {.steady_bytes = largest(steady - before), .peak_bytes = largest(memory.peak() - steady)};
}

void MemorySide::require_same_gradients(const std::string& job, const std::string& mode,
                                        const std::string& reference, int blocks) {
  MemorySide expected(job, reference, blocks);
  MemorySide actual(job, mode, blocks);
  expected.forward_backward();
  actual.forward_backward();
  const auto right = expected.job_.model->parameters();
  const auto ours = actual.job_.model->parameters();
  const auto is_right = std::ranges::equal(
      ours, right, [](const auto& a, const auto& b) { return at::equal(a.grad(), b.grad()); });
  if (largest(is_right ? 0 : 1) == 0) return;
  stop_all("bench memory: expected mode " + mode + " of job " + job +
           " to compute the gradients of mode " + reference + ", got others");
}

}  // namespace tessera::benchmarks
