#include "memory_sides.h"

#include <tessera/comm.h>
#include <tessera/dtensor.h>
#include <tessera/state_dict.h>

#include "counted_memory.h"
#include "rank0.h"
#include "shared_mappings.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kTolerance = 1e-5;  // of what the largest element of a gradient is

at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor::of(tensor).full_tensor() : tensor;
}

bool is_near(const at::Tensor& actual, const at::Tensor& expected) {
  const auto distance = (actual - expected).abs().max().item<double>();
  return distance <= kTolerance * expected.abs().max().item<double>();  // false if one is nan
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

MemorySide::MemorySide(const MemoryJob& job, const std::string& mode)
    : MemorySide(make_in_mode(job, mode, /*batch=*/rank())) {}

MemorySide::MemorySide(Job job)
    : job_(std::move(job)), optimizer_(job_.model->parameters(), {.lr = 1e-3, .fused = true}) {}

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

MemoryUse MemorySide::measure(const MemoryJob& job, const std::string& mode) {
  CountedMemory memory;
  const SharedMappings shared;
  const auto before = memory.live();
  memory.restart_peak();
  MemorySide side(job, mode);
  auto steady = memory.live();
  if (!is_start(mode)) {
    side.step();
    steady = memory.live();
    memory.restart_peak();
    side.forward_backward();
  }
  if (rank() == 0) std::cerr << describe_units(*side.job_.model);
  // All ranks of the group map the same bytes: each answers for its part of them.
  const auto share = shared.bytes() / static_cast<size_t>(world_size());
  return {.steady_bytes = largest(steady - before + share),
          .peak_bytes = largest(memory.peak() - steady)};
}

void MemorySide::require_same_gradients(const MemoryJob& job, const std::string& mode,
                                        const std::string& reference) {
  const int batch = is_exact(mode) ? rank() : 0;
  MemorySide expected(make_in_mode(job, reference, batch));
  MemorySide actual(make_in_mode(job, mode, batch));
  if (is_start(mode)) load_state_dict(*actual.job_.model, state_dict(*expected.job_.model));
  expected.forward_backward();
  actual.forward_backward();
  const auto right = expected.job_.model->parameters();
  const auto ours = actual.job_.model->parameters();
  bool is_right = ours.size() == right.size();
  for (size_t i = 0; i < std::min(ours.size(), right.size()); ++i) {
    const auto gradient = whole(ours[i].grad());  // a collective: before anything is decided
    is_right &=
        is_exact(mode) ? at::equal(gradient, right[i].grad()) : is_near(gradient, right[i].grad());
  }
  if (largest(is_right ? 0 : 1) == 0) return;
  stop_all("bench memory: expected mode " + mode + " of job " + job.label() +
           " to compute the gradients of mode " + reference + ", got others");
}

}  // namespace tessera::benchmarks
