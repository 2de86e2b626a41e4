// What one layout on some ranks saves, another layout on others loads.
#include <tessera/tessera.h>

#include "state/checkpoint_training.h"
#include "state/files/disk.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <mutex>
#include <random>
#include <set>

namespace tessera::testing {
namespace {

struct Place {
  Layout layout;
  int ranks;
};

std::string text_of(const Place& place) {
  return std::string(name_of(place.layout)) + std::to_string(place.ranks);
}

/// What the ranks of a run leave for the test.
struct Left {
  Wholes saved, after;  // at the save, and a step later
};

/// Trains for two steps, saves, and trains for one more.
Left save_from(const Place& place, const std::string& dir) {
  Left left;
  run_threads(place.ranks, [&] {
    auto net = make_checkpoint_net(place.layout);
    auto optimizer = make_adamw(net);
    for (int step = 0; step < 2; ++step) train_step(net, optimizer, step);
    save(dir, net, optimizer,
         {{"rank", std::to_string(rank())}, {"bytes", std::string("\0\xff\n", 3)}});
    auto saved = wholes_of(net, optimizer, packed_ranks_of(place.layout));
    train_step(net, optimizer, 2);
    auto after = wholes_of(net, optimizer, packed_ranks_of(place.layout));
    if (rank() == 0) left = {std::move(saved), std::move(after)};
  });
  return left;
}

/// Loads into a model that starts with other values, compares, and trains for one step.
void load_into(const Place& from, const Place& place, const std::string& dir, const Left& left) {
  run_threads(place.ranks, [&] {
    SCOPED_TRACE(text_of(from) + " to " + text_of(place));
    auto net = make_checkpoint_net(place.layout, /*seed=*/99);
    auto optimizer = make_adamw(net);
    const auto extra = load(dir, net, optimizer);
    EXPECT_EQ(extra.at("rank"), std::to_string(from.ranks == place.ranks ? rank() : 0));
    EXPECT_EQ(extra.at("bytes"), std::string("\0\xff\n", 3));
    expect_wholes(wholes_of(net, optimizer, packed_ranks_of(place.layout)), left.saved, true);
    train_step(net, optimizer, 2);
    expect_wholes(wholes_of(net, optimizer, packed_ranks_of(place.layout)), left.after,
                  from.layout == place.layout && from.ranks == place.ranks);
  });
}

class CheckpointLayoutsOnThreads : public ::testing::TestWithParam<Layout> {};

/// From every layout to every layout, on numbers of ranks that change.
TEST_P(CheckpointLayoutsOnThreads, LoadIntoEveryOther) {
  int turn = static_cast<int>(GetParam());
  for (const int ranks : {1, 2, 3, 4}) {
    const Place from{GetParam(), ranks};
    const TemporaryFolder folder;
    const auto dir = (folder.path() / "step-2").string();
    const auto left = save_from(from, dir);
    verify_checkpoint(dir);
    load_into(from, from, dir, left);
    for (const auto layout : {Layout::Plain, Layout::Replicate, Layout::FullyShard,
                              Layout::FullyShardColumns, Layout::Hybrid, Layout::Tp,
                              Layout::TpPacked, Layout::TpReplicate, Layout::TpFullyShard}) {
      const Place to{layout, turn++ % 4 + 1};
      load_into(from, to, dir, left);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, CheckpointLayoutsOnThreads,
                         ::testing::Values(Layout::Plain, Layout::Replicate, Layout::FullyShard,
                                           Layout::FullyShardColumns, Layout::Hybrid, Layout::Tp,
                                           Layout::TpPacked, Layout::TpReplicate,
                                           Layout::TpFullyShard),
                         [](const auto& info) { return name_of(info.param); });

TEST(CheckpointOnThreads, EachValueIsWrittenOnceAndRanksShareTheWork) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "plain").string();
  run_threads(2, [&] {
    auto net = seeded(1, [] { return torch::nn::Linear(512, 511); });
    save(dir, net);
  });
  const auto index = read_checkpoint_index(dir);
  ASSERT_EQ(index.world_size, 2);
  EXPECT_FALSE(index.has_optimizer);
  EXPECT_EQ(index.bytes(), 4U * (512 * 511 + 511));
  ASSERT_EQ(index.tensors.size(), 2U);
  for (const auto& tensor : index.tensors) EXPECT_EQ(tensor.parts.size(), 1U) << tensor.name;
  EXPECT_NE(index.tensors[0].parts[0].file, index.tensors[1].parts[0].file);

  const auto sharded = (folder.path() / "sharded").string();
  run_threads(2, [&] {
    auto net = seeded(1, [] { return nn::Linear(512, 511); });
    fully_shard(net);
    save(sharded, net);
  });
  const auto parts = read_checkpoint_index(sharded).tensors[1].parts;
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].shape, (std::vector<int64_t>{256, 512}));
  EXPECT_EQ(parts[1].shape, (std::vector<int64_t>{255, 512}));
  EXPECT_EQ(parts[1].offset, (std::vector<int64_t>{256, 0}));
  EXPECT_EQ(parts[1].name, "weight[256:511,0:512]");
}

/// Statistics of each rank's own batches.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    in = register_module("in", nn::Linear(4, 6));
    norm = register_module("norm", nn::BatchNorm1d(6));
    out = register_module("out", nn::Linear(6, 40));
  }
  at::Tensor forward(const at::Tensor& x) { return out(norm(in(x))); }
  nn::Linear in{nullptr}, out{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TESSERA_MODULE(Normed);

void save_normed(int ranks, const std::string& dir, bool is_sharded, Wholes& of_rank_0) {
  run_threads(ranks, [&] {
    auto net = seeded(1, [] { return Normed(); });
    is_sharded ? void(fully_shard(net)) : void(replicate(net));
    const at::NoGradGuard no_grad;
    net(seeded(2, [] { return at::randn({5, 4}); }) * (1 + rank()));
    save(dir, net);
    if (rank() != 0) return;
    for (const auto& item : net->named_buffers()) of_rank_0[item.key()] = item.value().clone();
  });
}

TEST(CheckpointOnThreads, BuffersThatDifferComeFromRank0) {
  for (const int ranks : {2, 3}) {
    for (const bool is_sharded : {false, true}) {
      const TemporaryFolder folder;
      const auto dir = (folder.path() / "a").string();
      Wholes expected;
      save_normed(ranks, dir, is_sharded, expected);
      ASSERT_EQ(expected.size(), 3U);
      Normed net;
      load(dir, net);
      for (const auto& item : net->named_buffers())
        expect_bitwise_equal(item.value(), expected.at(item.key()), item.key());
      std::set<std::string> files;
      for (const auto& tensor : read_checkpoint_index(dir).tensors)
        for (const auto& part : tensor.parts) files.insert(part.file);
      EXPECT_EQ(files.size(), static_cast<size_t>(ranks)) << "parameters are written by all ranks";
    }
  }
}

TEST(CheckpointOnThreads, ARankReadsOnlyWhatItHolds) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "one").string();
  const auto make = [] { return seeded(1, [] { return nn::Linear(1024, 16384); }); };  // 64 MiB
  save(dir, make());
  run_threads(4, [&] {
    auto net = make();
    fully_shard(net);
    barrier();
    const auto before = state::bytes_read_so_far();
    barrier();
    load(dir, net);
    barrier();
    // All four together: each its quarter, and headers and indices.
    EXPECT_LT(state::bytes_read_so_far() - before, (64U << 20) * 1.02 + (2U << 20));
  });
}

TEST(CheckpointOnThreads, OfTensorsWithTwoNamesIsWrittenOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      first = register_parameter("first", at::randn({3, 3}));
      second = register_parameter("second", first);
    }
    at::Tensor first, second;
  };
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "tied").string();
  Tied tied;
  save(dir, tied);
  const auto index = read_checkpoint_index(dir);
  ASSERT_EQ(index.tensors.size(), 2U);
  EXPECT_EQ(index.tensors[1].name, "second");
  EXPECT_EQ(index.tensors[1].alias_of, "first");
  EXPECT_EQ(index.bytes(), 36U);
  Tied again;
  load(dir, again);
  expect_bitwise_equal(again.second.detach(), tied.first.detach());
}

}  // namespace
}  // namespace tessera::testing
