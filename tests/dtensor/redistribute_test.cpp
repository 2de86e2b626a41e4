// Every way from placements to placements, against the whole tensor.
#include "dtensor/placed.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using Counts = std::map<std::string, int64_t>;

Counts counts_of(const comm_debug& scope) {
  Counts counts;
  for (const auto& [kind, count] : scope.counts()) counts[kind] = count.collectives;
  return counts;
}

/// Even, uneven, with empty shards, and nothing at all.
const std::vector<std::vector<int64_t>> kSizes = {{12, 12}, {5, 7}, {1, 3}, {2, 9}, {0, 4}};
const Tolerance kSums{1e-5, 1e-4};

std::vector<Placements> with_strided(std::vector<Placements> all, const DeviceMesh& mesh) {
  if (mesh.ndim() == 2) {
    all.push_back({StridedShard(0, mesh.size(1)), Shard(0)});
    all.push_back({StridedShard(1, mesh.size(1)), Shard(1)});
  }
  return all;
}

/// A mesh of threads, or of processes on a device.
struct MeshCase {
  MeshShape shape;
  std::optional<DeviceCase> where = std::nullopt;

  std::string name() const {
    return c10::str("Mesh_", c10::Join("_", shape), where ? "_" + where->backend : "");
  }
};
void PrintTo(const MeshCase& mesh, std::ostream* out) {  // NOLINT: gtest's name
  *out << mesh.name();
}

class Redistribute : public ::testing::TestWithParam<MeshCase> {
 protected:
  static void run(const std::function<void(const DeviceMesh&)>& body) {
    const auto& [shape, where] = GetParam();
    where ? on_mesh(*where, shape, body) : on_mesh(shape, body);
  }
};

TEST_P(Redistribute, EveryPairGivesThePartsOfTheWhole) {
  run([&](const DeviceMesh& mesh) {
    const auto ndim = static_cast<size_t>(mesh.ndim());
    const auto sources =
        with_strided(combinations({Replicate(), Shard(0), Shard(1), Partial()}, ndim), mesh);
    const auto targets = with_strided(combinations({Replicate(), Shard(0), Shard(1)}, ndim), mesh);
    for (const auto& sizes : kSizes) {
      const auto whole = numbered(sizes, run_device());
      for (const auto& from : sources) {
        const auto tensor = placed(whole, mesh, from);
        for (const auto& to : targets) {
          const auto label = c10::str(c10::IntArrayRef(sizes), " ", from, " to ", to);
          const auto moved = tensor.redistribute(to);
          EXPECT_EQ(moved.placements(), to) << label;
          EXPECT_EQ(moved.sizes(), whole.sizes()) << label;
          expect_equal(moved.to_local(), part_by_hand(whole, mesh, to), label, kSums);
        }
        expect_equal(tensor.to_local(), part_by_hand(whole, mesh, from), "the source is as it was");
      }
    }
  });
}

TEST_P(Redistribute, GradientsComeBackToWhereTheTensorWas) {
  run([&](const DeviceMesh& mesh) {
    const auto ndim = static_cast<size_t>(mesh.ndim());
    const auto whole = numbered({5, 7}, run_device());
    const auto gradient = numbered({5, 7}, run_device()).flip(0).contiguous();
    for (const auto& from :
         with_strided(combinations({Replicate(), Shard(0), Shard(1), Partial()}, ndim), mesh)) {
      for (const auto& to :
           with_strided(combinations({Replicate(), Shard(0), Shard(1)}, ndim), mesh)) {
        const auto label = c10::str(from, " to ", to);
        auto leaf = placed(whole, mesh, from);
        leaf.requires_grad_();
        leaf.redistribute(to).backward(placed(gradient, mesh, to));
        auto expected = from;
        std::replace_if(
            expected.begin(), expected.end(), [](const auto& one) { return one.is_partial(); },
            Replicate());
        const auto result = DTensor::of(leaf.grad());
        EXPECT_EQ(result.placements(), expected) << label;
        expect_equal(result.to_local(), part_by_hand(gradient, mesh, expected), label);
      }
    }
  });
}

TEST_P(Redistribute, ShardsAreAddedToPartialTargetsWithoutSending) {
  run([&](const DeviceMesh& mesh) {
    const auto ndim = static_cast<size_t>(mesh.ndim());
    const Placements sums(ndim, Partial());
    for (const auto& sizes : kSizes) {
      const auto whole = numbered(sizes, run_device());
      for (const auto& from :
           with_strided(combinations({Replicate(), Shard(0), Shard(1), Partial()}, ndim), mesh)) {
        auto target = placed(whole * 2, mesh, sums);
        const comm_debug scope;
        target.add_(placed(whole, mesh, from), 0.5);
        EXPECT_EQ(counts_of(scope), Counts()) << from;
        EXPECT_EQ(target.placements(), sums);
        expect_equal(full_of(target), whole * 2.5, c10::str(c10::IntArrayRef(sizes), " ", from),
                     kSums);
      }
    }
    auto average = placed(numbered({5, 7}, run_device()), mesh, Placements(ndim, Partial("avg")));
    const auto before = full_of(average);
    average.add_(placed(numbered({5, 7}, run_device()), mesh, Placements(ndim, Shard(0))));
    expect_equal(full_of(average), before + numbered({5, 7}, run_device()), "averages", kSums);
  });
}

TEST_P(Redistribute, AsyncResultsWaitAtFirstUse) {
  run([&](const DeviceMesh& mesh) {
    const auto ndim = static_cast<size_t>(mesh.ndim());
    const auto whole = numbered({5, 7}, run_device());
    const auto targets = combinations({Replicate(), Shard(0), Shard(1)}, ndim);
    std::vector<DTensor> under_way;
    for (const auto& to : targets) {
      for (const auto& from : {Placements(ndim, Shard(0)), Placements(ndim, Partial())})
        under_way.push_back(placed(whole, mesh, from).redistribute(to, /*async_op=*/true));
    }
    for (size_t i = under_way.size(); i-- > 0;) {
      const auto label = c10::str("to ", under_way[i].placements());
      const auto use =
          i % 2 == 0 ? DTensor::of(under_way[i] * 2).to_local() / 2 : under_way[i].to_local();
      expect_equal(use, part_by_hand(whole, mesh, under_way[i].placements()), label, kSums);
    }
    auto leaf = placed(whole, mesh, Placements(ndim, Shard(1)));
    leaf.requires_grad_();
    (leaf.redistribute(Placements(ndim), /*async_op=*/true) * 3).sum().backward();
    expect_equal(full_of(leaf.grad()), torch::full({5, 7}, 3.0));
  });
}

std::string name_of(const ::testing::TestParamInfo<MeshCase>& test) { return test.param.name(); }

INSTANTIATE_TEST_SUITE_P(OnThreads, Redistribute,
                         ::testing::Values(MeshCase{{2}}, MeshCase{{3}}, MeshCase{{4}},
                                           MeshCase{{2, 2}}, MeshCase{{2, 3}}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OnCuda, Redistribute,
                         ::testing::Values(MeshCase{{2}, DeviceCase{at::kCUDA, "nccl"}},
                                           MeshCase{{2}, DeviceCase{at::kCUDA, "shm"}},
                                           MeshCase{{4}, DeviceCase{at::kCUDA, "shm"}},
                                           MeshCase{{2, 2}, DeviceCase{at::kCUDA, "shm"}}),
                         name_of);

/// An operation, what rank r of 3 holds and what the whole then is.
struct Reduction {
  const char* name;
  at::Tensor (*join)(const at::Tensor& stacked);
};

at::Tensor folded(const at::Tensor& stacked,
                  at::Tensor (*step)(const at::Tensor&, const at::Tensor&)) {
  auto result = stacked[0];
  for (int64_t i = 1; i < stacked.size(0); ++i) result = step(result, stacked[i]);
  return result;
}

TEST(RedistributeOnThreads, PartialOfEveryOperation) {
  const std::vector<Reduction> reductions = {
      {"sum", [](const at::Tensor& all) { return all.sum(0, false, all.scalar_type()); }},
      {"max", [](const at::Tensor& all) { return all.amax(0); }},
      {"min", [](const at::Tensor& all) { return all.amin(0); }},
      {"product", [](const at::Tensor& all) { return all.prod(0, false, all.scalar_type()); }},
      {"band", [](const at::Tensor& all) { return folded(all, at::bitwise_and); }},
      {"bor", [](const at::Tensor& all) { return folded(all, at::bitwise_or); }},
      {"bxor", [](const at::Tensor& all) { return folded(all, at::bitwise_xor); }},
      {"avg", [](const at::Tensor& all) { return all.mean(0); }},
  };
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const auto& reduction : reductions) {
      const bool is_float = std::string(reduction.name) == "avg";
      const auto stacked = (torch::arange(60, torch::kLong).view({3, 5, 4}) * 7 % 13 + 1)
                               .to(is_float ? torch::kFloat : torch::kLong);
      const auto whole = reduction.join(stacked);
      const auto tensor =
          DTensor::from_local(stacked[rank()].clone(), mesh, {Partial(reduction.name)});
      expect_equal(tensor.full_tensor(), whole, reduction.name);
      for (const int64_t dim : {0, 1}) {
        expect_equal(tensor.redistribute({Shard(dim)}).to_local(),
                     chunk_by_hand(whole, dim, 3, rank()), reduction.name);
      }
    }
  });
}

struct Transition {
  MeshShape mesh;
  Placements from;
  Placements to;
  Counts expected;
};

TEST(RedistributeOnThreads, FewestCollectives) {
  const Placement r = Replicate();
  const Placement p = Partial();
  const Placement s0 = Shard(0);
  const Placement s1 = Shard(1);
  const std::vector<Transition> transitions = {
      {{4}, {s0}, {s1}, {{"all_to_all", 1}}},
      {{4}, {s1}, {r}, {{"all_gather", 1}}},
      {{4}, {p}, {r}, {{"all_reduce", 1}}},
      {{4}, {p}, {s0}, {{"reduce_scatter", 1}}},
      {{4}, {p}, {s1}, {{"reduce_scatter", 1}}},
      {{4}, {r}, {s1}, {}},
      {{4}, {s0}, {s0}, {}},
      {{4}, {s0}, {Shard(-2)}, {}},
      {{1, 4}, {s0, r}, {r, r}, {}},
      {{1, 4}, {p, s0}, {s1, s0}, {}},
      {{2, 2}, {s0, s0}, {r, r}, {{"all_gather", 2}}},
      {{2, 2}, {s0, s0}, {s0, r}, {{"all_gather", 1}}},
      {{2, 2}, {s0, r}, {s0, s0}, {}},
      {{2, 2}, {s0, s0}, {s0, s1}, {{"all_to_all", 1}}},
      {{2, 2}, {s0, s1}, {s0, s0}, {{"all_to_all", 1}}},
      {{2, 2}, {s0, p}, {s0, s0}, {{"reduce_scatter", 1}}},
      {{2, 2}, {p, p}, {r, r}, {{"all_reduce", 2}}},
      {{2, 2}, {p, p}, {s0, s1}, {{"reduce_scatter", 2}}},
      {{2, 2}, {r, s0}, {StridedShard(0, 2), s0}, {}},
      {{2, 2}, {StridedShard(0, 2), s0}, {r, s0}, {{"all_gather", 1}}},
  };
  const auto whole = numbered({8, 8});
  for (const auto& transition : transitions) {
    on_mesh(transition.mesh, [&](const DeviceMesh& mesh) {
      const auto tensor = placed(whole, mesh, transition.from);
      const comm_debug scope;
      const auto moved = tensor.redistribute(transition.to);
      EXPECT_EQ(counts_of(scope), transition.expected)
          << transition.from << " to " << transition.to << '\n'
          << scope.to_string();
      expect_equal(moved.to_local(), part_by_hand(whole, mesh, moved.placements()), "", kSums);
    });
  }
}

TEST(RedistributeOnThreads, InnerShardsUnwindBeforeOuterOnes) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({8, 8});
    const comm_debug scope;
    const auto moved =
        placed(whole, mesh, {Shard(0), Shard(0)}).redistribute({Replicate(), Shard(0)});
    expect_equal(moved.to_local(), part_by_hand(whole, mesh, {Replicate(), Shard(0)}));
    EXPECT_EQ(scope.total(), 2) << scope.to_string();
  });
}

TEST(RedistributeOnThreads, AllToAllCarriesThePartAlone) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto tensor = placed(numbered({16, 16}), mesh, {Shard(0)});
    const comm_debug scope;
    tensor.redistribute({Shard(1)});
    EXPECT_EQ(scope.counts().at("all_to_all").bytes, 16 * 16 * 4 / 4);
  });
}

TEST(RedistributeOnThreads, ResultsDoNotShareMemoryWithTheSource) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({4, 4});
    const auto tensor = placed(whole, mesh, {Replicate()});
    auto rows = tensor.redistribute({Shard(0)});
    rows.zero_();
    expect_equal(tensor.full_tensor(), whole);
  });
}

}  // namespace
}  // namespace tessera::testing
