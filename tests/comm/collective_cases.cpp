#include "comm/collective_cases.h"

#include <signal.h>

#include <algorithm>
#include <ostream>

namespace tessera::comm::shm {

at::Tensor sample(int rank, int64_t count) {
  return at::arange(count, at::kFloat).remainder(101).add(rank);
}
at::Tensor shared_sample(int rank, int64_t count) {
  return empty_shared({count}, at::kFloat).copy_(sample(rank, count));
}

namespace {

at::Tensor sum_of_samples(int64_t count) {
  auto sum = at::zeros({count});
  for (int peer = 0; peer < world_size(); ++peer) sum += sample(peer, count);
  return sum;
}

}  // namespace

void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(actual.equal(expected)) << "wrong numbers on rank " << rank();
}

void call_all_reduce(at::Tensor tensor) {
  Tensors tensors{tensor};
  default_group()->allreduce(tensors)->wait();
  expect_same(tensor, sum_of_samples(tensor.numel()));
}

namespace {

void call_broadcast(at::Tensor tensor) {
  Tensors tensors{tensor};
  default_group()->broadcast(tensors)->wait();
  expect_same(tensor, sample(0, tensor.numel()));
}
void call_reduce(at::Tensor tensor) {
  Tensors tensors{tensor};
  default_group()->reduce(tensors)->wait();
  if (rank() == 0) expect_same(tensor, sum_of_samples(tensor.numel()));
}
void call_all_gather(at::Tensor input) {
  auto output = at::zeros({world_size(), input.numel()});
  default_group()->getBackend(at::kCPU)->_allgather_base(output, input, {})->wait();
  for (int peer = 0; peer < world_size(); ++peer)
    expect_same(output[peer], sample(peer, input.numel()));
}
void call_reduce_scatter(at::Tensor input) {
  auto output = at::zeros({input.numel() / world_size()});
  default_group()->getBackend(at::kCPU)->_reduce_scatter_base(output, input, {})->wait();
  expect_same(output, sum_of_samples(input.numel()).chunk(world_size())[rank()]);
}
void call_all_to_all() {  // to rank p go p + 1 numbers
  Tensors inputs;
  Tensors outputs;
  for (int peer = 0; peer < world_size(); ++peer) {
    inputs.push_back(sample(rank(), peer + 1));
    outputs.push_back(at::zeros({rank() + 1}));
  }
  default_group()->alltoall(outputs, inputs)->wait();
  for (int peer = 0; peer < world_size(); ++peer)
    expect_same(outputs[peer], sample(peer, rank() + 1));
}
void call_gather() {
  std::vector<Tensors> outputs;
  if (rank() == 1) outputs = {{at::zeros({kSmall}), at::zeros({kSmall}), at::zeros({kSmall})}};
  Tensors inputs{sample(rank(), kSmall)};
  default_group()->gather(outputs, inputs, {.rootRank = 1})->wait();
  for (int peer = 0; peer < 3 && rank() == 1; ++peer)
    expect_same(outputs[0][peer], sample(peer, kSmall));
}
void call_scatter() {
  std::vector<Tensors> inputs;
  if (rank() == 2) inputs = {{sample(0, kSmall), sample(1, kSmall), sample(2, kSmall)}};
  Tensors outputs{at::zeros({kSmall})};
  default_group()->scatter(outputs, inputs, {.rootRank = 2})->wait();
  expect_same(outputs[0], sample(rank(), kSmall));
}

template <void (*call)(at::Tensor), int64_t count>
void on() {
  call(sample(rank(), count));
}
template <void (*call)(at::Tensor)>
void shared() {
  call(shared_sample(rank(), kLarge));
}

}  // namespace

void PrintTo(const CollectiveCase& collective, std::ostream* out) { *out << collective.name; }

std::vector<CollectiveCase> collective_cases() {
  using enum Phase;
  // name, operation, ranks, victim, occurrence, readers, last, call
  return {
      {"AllReduce", "all_reduce", 2, 1, 1, {0}, Filled, on<call_all_reduce, kSmall>},
      {"AllReduceOfFour", "all_reduce", 4, 2, 1, {0, 1, 3}, Filled, on<call_all_reduce, kSmall>},
      {"AllReduceLarge", "all_reduce", 2, 0, 2, {1}, Posted, on<call_all_reduce, kLarge>},
      {"AllReduceInParts", "all_reduce", 3, 0, 2, {1, 2}, Posted, on<call_all_reduce, kLarge>},
      {"AllReduceShared", "all_reduce", 3, 1, 2, {0, 2}, Posted, shared<call_all_reduce>},
      {"Broadcast", "broadcast", 3, 0, 1, {1, 2}, Filled, on<call_broadcast, kSmall>},
      {"BroadcastLarge", "broadcast", 2, 0, 2, {1}, Posted, on<call_broadcast, kLarge>},
      {"BroadcastShared", "broadcast", 3, 2, 1, {0}, Posted, shared<call_broadcast>},
      {"Reduce", "reduce", 3, 2, 1, {0}, Filled, on<call_reduce, kSmall>},
      {"AllGather", "all_gather", 3, 0, 1, {1, 2}, Filled, on<call_all_gather, kSmall>},
      {"AllGatherShared", "all_gather", 2, 1, 1, {0}, Posted, shared<call_all_gather>},
      {"ReduceScatter", "reduce_scatter", 3, 1, 1, {0, 2}, Filled, on<call_reduce_scatter, 300>},
      {"ReduceScatterShared", "reduce_scatter", 2, 0, 1, {1}, Posted, shared<call_reduce_scatter>},
      {"AllToAll", "all_to_all", 3, 2, 1, {0, 1}, Filled, call_all_to_all},
      {"Gather", "gather", 3, 0, 1, {1}, Filled, call_gather},
      {"Scatter", "scatter", 3, 2, 1, {0, 1}, Filled, call_scatter},
      {"Barrier", "barrier", 3, 1, 1, {}, Announced, [] { barrier(); }},
  };
}

std::vector<Phase> phases_of(const CollectiveCase& collective) {
  if (collective.operation == "barrier")
    return {Phase::Announced, Phase::Drained, Phase::Concluded};
  return {Phase::Announced, Phase::Filled, Phase::Posted, Phase::Drained, Phase::Concluded};
}
std::string name_of(Phase phase) {
  constexpr const char* kNames[] = {"Announced", "Filled", "Posted", "Drained", "Concluded"};
  return kNames[static_cast<int>(phase)];
}
bool must_fail(const CollectiveCase& collective, Phase phase, int rank) {
  return phase <= collective.last && std::ranges::count(collective.readers, rank) > 0;
}

void set_trap(const CollectiveCase& collective, Phase phase, uint64_t sequence, int signal) {
  static struct {
    Phase phase;
    uint64_t sequence;
    int left;
    int signal;
  } trap;
  const bool repeats = phase == Phase::Filled || phase == Phase::Posted;
  trap = {phase, sequence, repeats ? collective.occurrence : 1, signal};
  phase_hook = [](Phase reached, const Descriptor& descriptor) {
    if (reached == trap.phase && descriptor.sequence == trap.sequence && --trap.left == 0)
      raise(trap.signal);
  };
}

}  // namespace tessera::comm::shm
