// Nestings of checkpoint, replicate, fully_shard and tensor parallelism over trees of modules,
// drawn by seed, against one process without any of them.
#include "compose/drawn_nesting.h"
#include "compose/drawn_training.h"
#include "compose/models.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

namespace tessera::testing {
namespace {

struct NestingWorld {
  const char* backend;
  int ranks;
  int nestings;    // of make test-compose
  uint64_t first;  // of its seeds, so that no two worlds have the same
};
void PrintTo(const NestingWorld& world, std::ostream* out) {  // NOLINT: gtest's name
  *out << world.ranks << " ranks over " << world.backend;
}

constexpr Tolerance kHigh{.rtol = 1e-6, .atol = 1e-7};
// A weight that is rounded to another bfloat16 than the reference's is off by 1 in 256; a sum that
// lacks a rank's part is off by more than the gradients are large.
constexpr Tolerance kLow{.rtol = 1e-2, .atol = 2e-3};

/// 1: all nestings (make test-compose); by default a sample.
double share() {
  const char* variable = std::getenv("TESSERA_COMPOSE_SHARE");
  return variable != nullptr ? std::atof(variable) : 0.05;
}

/// Those that so many ranks can have; made once, as groups are.
std::vector<Layout> layouts() {
  std::vector<Layout> all{{.name = "flat"}};
  if (world_size() != 4) return all;
  all.push_back(
      {.name = "hybrid", .hybrid = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"})});
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  all.push_back({.name = "tensor parallel", .data = mesh["dp"], .tensor = mesh["tp"]});
  return all;
}

/// What is drawn besides the nesting.
struct Course {
  bool is_mixed = false;
  bool accumulates = false;  // two batches per step, the first without communication
};

void expect_nesting_trains(uint64_t seed, const std::vector<Layout>& layouts) {
  Random random(seed);
  const auto& layout = layouts[draw(random, 0, static_cast<int64_t>(layouts.size()) - 1)];
  const auto tree = draw_tree(random);
  auto nesting = draw_nesting(random, tree.root, layout);
  const Course course{.is_mixed = !layout.tensor && one_in(random, 4),
                      .accumulates = one_in(random, 3)};
  if (course.is_mixed) draw_precision(random, layout, nesting);
  const auto text =
      c10::str("TESSERA_TEST_SEED=", seed, ", ", layout.name, ", width ", tree.width,
               course.accumulates ? ", two batches a step: " : ": ", describe(tree.root, nesting));
  SCOPED_TRACE(text);
  try {
    const auto make = [&] { return seeded(seed, [&] { return build(tree); }); };
    const auto group = layout.data_group();
    auto reference = course.is_mixed ? low_reference(make, world_size(group)) : trainee_of(make());
    const auto part = make();
    apply(nesting, part, layout);
    auto parallel = trainee_of(part);
    if (course.accumulates) {
      reference = in_two_batches(reference, world_size(group), nullptr);
      parallel = in_two_batches(parallel, /*ranks=*/1, part.module);
    }
    expect_training_parity(reference, parallel,
                           {.steps = 5,
                            .optimizer = course.is_mixed ? sgd(1e-2) : adam(1e-2),
                            .input = {16, kTreeInput},
                            .local_batch_of = group,
                            .full = whole,
                            .seed = seed,
                            .tolerance = course.is_mixed ? kLow : kHigh});
  } catch (const std::exception& error) {
    TORCH_CHECK(false, text, "\n", error.what());
  }
}

class Nestings : public ::testing::TestWithParam<NestingWorld> {};
INSTANTIATE_TEST_SUITE_P(
    Drawn, Nestings,
    ::testing::Values(NestingWorld{"shm", 2, 100, 0}, NestingWorld{"shm", 4, 100, 1000},
                      NestingWorld{"gloo", 2, 20, 2000}, NestingWorld{"gloo", 4, 20, 3000}),
    [](const auto& info) { return info.param.backend + std::to_string(info.param.ranks); });

TEST_P(Nestings, TrainLikeOneProcess) {
  const auto& world = GetParam();
  const int nestings = static_cast<int>(std::ceil(share() * world.nestings));
  run_processes(world.ranks,
                [&] {
                  const auto all = layouts();
                  // A given seed is that of a failure, to be repeated: as it stands.
                  const bool repeats = std::getenv("TESSERA_TEST_SEED") != nullptr;
                  const uint64_t first = test_seed() + (repeats ? 0 : world.first);
                  bool has_failed = false;
                  for (int i = 0; i < nestings && !has_failed; ++i) {
                    expect_nesting_trains(first + i, all);
                    // All ranks stop at the same nesting, or some would wait.
                    const auto failures = torch::full({1}, ::testing::Test::HasFailure() ? 1 : 0);
                    has_failed = all_reduce(failures, ReduceOp::MAX).item<int64_t>() > 0;
                  }
                },
                {.backend = world.backend, .deadline = std::chrono::seconds(280)});
}

}  // namespace
}  // namespace tessera::testing
