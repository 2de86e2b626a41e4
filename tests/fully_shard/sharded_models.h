#pragma once

#include <tessera/fully_shard.h>
#include <tessera/parallelize.h>
#include <tessera/state_dict.h>

#include "fully_shard/models.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/training.h"

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

/// The ways in which tests of state shard a Stack.
namespace tessera::testing {

struct World {
  std::string backend;
  int ranks;
};
inline void PrintTo(const World& world, std::ostream* out) {  // NOLINT: gtest's name
  *out << world.ranks << " ranks over " << world.backend;
}

inline const auto kWorlds = ::testing::Values(World{"shm", 1}, World{"shm", 2}, World{"shm", 3},
                                              World{"gloo", 2}, World{"gloo", 3});
inline std::string name_of(const ::testing::TestParamInfo<World>& info) {
  return info.param.backend + std::to_string(info.param.ranks);
}

/// Runs a body on the ranks of a world.
class OnWorld : public ::testing::TestWithParam<World> {
 protected:
  void run(const RankBody& body) {
    run_processes(GetParam().ranks, body, {.backend = GetParam().backend});
  }
};

/// A folder that the ranks of all runs of a test see: they execute the test's own lines again, but
/// the parent alone makes and removes it.
class SharedFolder {
 public:
  SharedFolder() {
    if (const char* given = std::getenv(kVariable))
      path_ = given;
    else
      path_ = own_.emplace().path();
  }
  const std::filesystem::path& path() const { return path_; }
  /// For run_processes.
  RankOptions options() const { return {.environment = {{kVariable, path_.string()}}}; }

 private:
  static constexpr const char* kVariable = "TESSERA_TEST_SHARED_FOLDER";
  std::optional<TemporaryFolder> own_;
  std::filesystem::path path_;
};

inline Stack make_stack(uint64_t seed) {
  return seeded(seed, [] { return Stack(); });
}

inline Stack shard(Stack net, const FullyShardOptions& options = {}) {
  for (const auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net, options);
  return net;
}

/// Copies along the first dimension of a 2 x 2 mesh.
inline Stack shard_hybrid(Stack net) {
  return shard(net, {.strategy = ShardingStrategy::HYBRID_SHARD,
                     .mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"})});
}

/// Blocks are tensor parallel along the second dimension of a 2 x 2 mesh, all is sharded along the
/// first.
inline Stack shard_parallel(Stack net) {
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  parallelize_module(net, mesh["tp"],
                     {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}});
  return shard(net, {.mesh = mesh["dp"]});
}

/// One step on this rank's rows of a batch that `number` stands for.
inline void train_step(Stack net, torch::optim::Optimizer& optimizer, int number, int parts,
                       int part) {
  const auto batch = seeded(100 + number, [] { return torch::randn({12, 5}); });
  optimizer.zero_grad();
  net(batch.chunk(parts)[part]).square().mean().backward();
  optimizer.step();
}
inline void train_step(const Stack& net, torch::optim::Optimizer& optimizer, int number) {
  train_step(net, optimizer, number, world_size(), rank());
}

/// Rows that `number` stands for, and those that are this rank's.
inline at::Tensor batch(int number) {
  return seeded(500 + number, [] { return torch::randn({12, 5}); });
}
inline at::Tensor own_batch(int number) { return batch(number).chunk(world_size())[rank()]; }

/// Every rank has rows of its own; the reference has all of them.
inline TrainingOptions split_batch(const Group& group = default_group()) {
  return {
      .steps = 4, .input = {12, 5}, .local_batch_of = group, .full = whole, .tolerance = kClose};
}

template <class Net>
void expect_equal_gradients(Net& sharded, Net& reference, const Tolerance& tolerance = kClose) {
  const auto expected = reference->named_parameters();
  for (const auto& item : sharded->named_parameters()) {
    const auto& right = expected[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), right.defined()) << item.key();
    if (right.defined())
      expect_equal(whole(item.value().grad()), whole(right), item.key(), tolerance);
  }
}

inline void expect_same(const StateDict& actual, const StateDict& expected,
                        const std::string& label) {
  ASSERT_EQ(actual.size(), expected.size()) << label;
  for (const auto& [name, value] : actual)
    expect_bitwise_equal(whole(value), whole(expected[name]), label + ": " + name);
}

/// Whole values of all parameters, on every rank.
inline StateDict values_of(Stack net) {
  StateDict values;
  for (const auto& item : net->named_parameters())
    values.insert(item.key(), whole(item.value().detach()).clone());
  return values;
}

}  // namespace tessera::testing
