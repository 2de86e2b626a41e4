#pragma once

#include <tessera/comm.h>

#include "comm/shm/channel.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

/// One call of every collective, with a rank that something happens to in the middle.
namespace tessera::comm::shm {

using Tensors = std::vector<at::Tensor>;

inline constexpr int64_t kSmall = 100;
inline constexpr int64_t kLarge = int64_t{1} << 18;  // 1 MiB: several rounds

/// What `rank` contributes: whole numbers, so that sums are exact.
inline at::Tensor sample(int rank, int64_t count) {
  return at::arange(count, at::kFloat).remainder(101).add(rank);
}
inline at::Tensor shared_sample(int rank, int64_t count) {
  return empty_shared({count}, at::kFloat).copy_(sample(rank, count));
}
inline at::Tensor sum_of_samples(int64_t count) {
  auto sum = at::zeros({count});
  for (int peer = 0; peer < world_size(); ++peer) sum += sample(peer, count);
  return sum;
}
inline void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(actual.equal(expected)) << "wrong numbers on rank " << rank();
}

inline void call_all_reduce(const at::Tensor& tensor) {
  Tensors tensors{tensor};
  default_group()->allreduce(tensors)->wait();
  expect_same(tensor, sum_of_samples(tensor.numel()));
}
inline void call_broadcast(const at::Tensor& tensor) {
  Tensors tensors{tensor};
  default_group()->broadcast(tensors)->wait();
  expect_same(tensor, sample(0, tensor.numel()));
}
inline void call_reduce() {
  Tensors tensors{sample(rank(), kSmall)};
  default_group()->reduce(tensors)->wait();
  if (rank() == 0) expect_same(tensors[0], sum_of_samples(kSmall));
}
inline void call_all_gather(at::Tensor input) {
  auto output = at::zeros({world_size(), input.numel()});
  default_group()->getBackend(at::kCPU)->_allgather_base(output, input, {})->wait();
  for (int peer = 0; peer < world_size(); ++peer) expect_same(output[peer], sample(peer, input.numel()));
}
inline void call_reduce_scatter(at::Tensor input) {
  auto output = at::zeros({input.numel() / world_size()});
  default_group()->getBackend(at::kCPU)->_reduce_scatter_base(output, input, {})->wait();
  expect_same(output, sum_of_samples(input.numel()).chunk(world_size())[rank()]);
}
inline void call_all_to_all() {  // to rank p go p + 1 numbers
  Tensors inputs;
  Tensors outputs;
  for (int peer = 0; peer < world_size(); ++peer) {
    inputs.push_back(sample(rank(), peer + 1));
    outputs.push_back(at::zeros({rank() + 1}));
  }
  default_group()->alltoall(outputs, inputs)->wait();
  for (int peer = 0; peer < world_size(); ++peer) expect_same(outputs[peer], sample(peer, rank() + 1));
}
inline void call_gather() {
  std::vector<Tensors> outputs;
  if (rank() == 1) outputs = {{at::zeros({kSmall}), at::zeros({kSmall}), at::zeros({kSmall})}};
  Tensors inputs{sample(rank(), kSmall)};
  default_group()->gather(outputs, inputs, {.rootRank = 1})->wait();
  for (int peer = 0; peer < 3 && rank() == 1; ++peer) expect_same(outputs[0][peer], sample(peer, kSmall));
}
inline void call_scatter() {
  std::vector<Tensors> inputs;
  if (rank() == 2) inputs = {{sample(0, kSmall), sample(1, kSmall), sample(2, kSmall)}};
  Tensors outputs{at::zeros({kSmall})};
  default_group()->scatter(outputs, inputs, {.rootRank = 2})->wait();
  expect_same(outputs[0], sample(rank(), kSmall));
}

struct CollectiveCase {
  std::string name;
  std::string operation;  // as errors call it
  int ranks;
  int victim;
  int occurrence;            // which Filled or Posted of the call is meant
  std::vector<int> readers;  // ranks that can't complete the call ...
  Phase last;                // ... if the victim gets no further than this
  void (*call)();
};
inline void PrintTo(const CollectiveCase& c, std::ostream* out) { *out << c.name; }  // NOLINT: gtest's name

inline std::vector<CollectiveCase> collective_cases() {
  using enum Phase;
  return {
      {"AllReduce", "all_reduce", 2, 1, 1, {0}, Filled, [] { call_all_reduce(sample(rank(), kSmall)); }},
      {"AllReduceOfFour", "all_reduce", 4, 2, 1, {0, 1, 3}, Filled, [] { call_all_reduce(sample(rank(), kSmall)); }},
      {"AllReduceLarge", "all_reduce", 2, 0, 2, {1}, Posted, [] { call_all_reduce(sample(rank(), kLarge)); }},
      {"AllReduceInParts", "all_reduce", 3, 0, 2, {1, 2}, Posted, [] { call_all_reduce(sample(rank(), kLarge)); }},
      {"AllReduceShared", "all_reduce", 3, 1, 2, {0, 2}, Posted, [] { call_all_reduce(shared_sample(rank(), kLarge)); }},
      {"Broadcast", "broadcast", 3, 0, 1, {1, 2}, Filled, [] { call_broadcast(sample(rank(), kSmall)); }},
      {"BroadcastLarge", "broadcast", 2, 0, 2, {1}, Posted, [] { call_broadcast(sample(rank(), kLarge)); }},
      {"BroadcastShared", "broadcast", 3, 2, 1, {0}, Posted, [] { call_broadcast(shared_sample(rank(), kLarge)); }},
      {"Reduce", "reduce", 3, 2, 1, {0}, Filled, call_reduce},
      {"AllGather", "all_gather", 3, 0, 1, {1, 2}, Filled, [] { call_all_gather(sample(rank(), kSmall)); }},
      {"AllGatherShared", "all_gather", 2, 1, 1, {0}, Posted, [] { call_all_gather(shared_sample(rank(), kLarge)); }},
      {"ReduceScatter", "reduce_scatter", 3, 1, 1, {0, 2}, Filled, [] { call_reduce_scatter(sample(rank(), 3 * kSmall)); }},
      {"ReduceScatterShared", "reduce_scatter", 2, 0, 1, {1}, Posted,
       [] { call_reduce_scatter(shared_sample(rank(), kLarge)); }},
      {"AllToAll", "all_to_all", 3, 2, 1, {0, 1}, Filled, call_all_to_all},
      {"Gather", "gather", 3, 0, 1, {1}, Filled, call_gather},
      {"Scatter", "scatter", 3, 2, 1, {0, 1}, Filled, call_scatter},
      {"Barrier", "barrier", 3, 1, 1, {}, Announced, [] { barrier(); }},
  };
}

/// The phases that a case goes through; a barrier has no data.
inline std::vector<Phase> phases_of(const CollectiveCase& collective) {
  if (collective.operation == "barrier") return {Phase::Announced, Phase::Drained, Phase::Concluded};
  return {Phase::Announced, Phase::Filled, Phase::Posted, Phase::Drained, Phase::Concluded};
}
inline std::string name_of(Phase phase) {
  constexpr const char* kNames[] = {"Announced", "Filled", "Posted", "Drained", "Concluded"};
  return kNames[static_cast<int>(phase)];
}
inline bool must_fail(const CollectiveCase& collective, Phase phase, int rank) {
  return phase <= collective.last && std::ranges::count(collective.readers, rank) > 0;
}

/// From now on the process sends itself `number` when its collective `sequence` reaches the phase.
inline void set_trap(const CollectiveCase& collective, Phase phase, uint64_t sequence, int number) {
  static struct {
    Phase phase;
    uint64_t sequence;
    int left;
    int number;
  } trap;
  const bool repeats = phase == Phase::Filled || phase == Phase::Posted;
  trap = {phase, sequence, repeats ? collective.occurrence : 1, number};
  phase_hook = [](Phase reached, const Descriptor& descriptor) {
    if (reached == trap.phase && descriptor.sequence == trap.sequence && --trap.left == 0) raise(trap.number);
  };
}

}  // namespace tessera::comm::shm
