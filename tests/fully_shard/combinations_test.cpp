// The table of docs/guide/fully_shard.md: which options go together, and which are refused.
#include "fully_shard/sharded_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

namespace tessera::testing {
namespace {

using enum ShardingStrategy;
using ::testing::HasSubstr;

DeviceMesh line() { return init_device_mesh(torch::kCPU, {4}, {"shards"}); }
DeviceMesh square() { return init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"}); }

/// Every strategy on four ranks, with the mesh that it needs.
std::vector<FullyShardOptions> strategies() {
  std::vector<FullyShardOptions> all;
  for (const auto strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD})
    all.push_back({.strategy = strategy});
  for (const auto strategy : {HYBRID_SHARD, HYBRID_SHARD_ZERO2})
    all.push_back({.strategy = strategy, .mesh = square()});
  return all;
}

using Change = std::function<void(FullyShardOptions&)>;

/// The strategies, with each of these changes.
std::vector<FullyShardOptions> changed(const std::vector<Change>& changes) {
  std::vector<FullyShardOptions> all;
  for (const auto& change : changes) {
    for (auto options : strategies()) {
      change(options);
      all.push_back(std::move(options));
    }
  }
  return all;
}

struct Row {
  const char* name;     // of the test
  const char* options;  // in the table
  std::function<std::vector<FullyShardOptions>()> make;
  Tolerance tolerance = kClose;
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.options; }  // NOLINT: gtest's name

std::vector<FullyShardOptions> over_groups() {
  std::vector<FullyShardOptions> all;
  for (const auto strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}) {
    all.push_back({.strategy = strategy});
    all.push_back({.process_group = default_group(), .strategy = strategy});
    all.push_back({.strategy = strategy, .mesh = line()});
  }
  return all;
}

std::vector<FullyShardOptions> over_squares() {
  std::vector<FullyShardOptions> all;
  for (const auto strategy : {FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2})
    all.push_back({.strategy = strategy, .mesh = square()});
  return all;
}

std::vector<FullyShardOptions> hybrids_without_squares() {
  std::vector<FullyShardOptions> all;
  for (const auto strategy : {HYBRID_SHARD, HYBRID_SHARD_ZERO2}) {
    all.push_back({.strategy = strategy});
    all.push_back({.process_group = default_group(), .strategy = strategy});
    all.push_back({.strategy = strategy, .mesh = line()});
  }
  return all;
}

/// The strategies with a mesh of three dimensions.
std::vector<FullyShardOptions> over_cubes() {
  return changed({[](auto& options) {
    options.mesh = init_device_mesh(torch::kCPU, {2, 2, 1}, {"a", "b", "c"});
  }});
}

std::vector<FullyShardOptions> numbers(std::initializer_list<int> of) {
  std::vector<Change> changes;
  for (const int number : of)
    changes.emplace_back([number](auto& options) { options.reshard_after_forward = number; });
  return changed(changes);
}

Change places(Placement placement) {
  return [placement](auto& options) {
    options.shard_placement_fn = [placement](const at::Tensor&) { return placement; };
  };
}

/// Units inside give what they compute, in 16 bits; the whole gives float32.
void compute_low(FullyShardOptions& options) {
  options.mixed_precision = {.param_dtype = torch::kBFloat16,
                             .reduce_dtype = torch::kFloat,
                             .buffer_dtype = torch::kBFloat16,
                             .cast_forward_inputs = true,
                             .output_dtype = torch::kFloat};
  options.policy = ModuleWrapPolicy::of<BlockImpl>();
}
constexpr Tolerance kRounded{.rtol = 0.1, .atol = 0.05};

const std::vector<Row> kRows = {
    {"Groups",
     "`FULL_SHARD`, `SHARD_GRAD_OP` or `NO_SHARD` over a `.process_group`, a 1-D `.mesh`, or "
     "neither",
     over_groups},
    {"Squares", "`FULL_SHARD`, `SHARD_GRAD_OP` or `HYBRID_…` over a 2-D `.mesh`", over_squares},
    {"HybridsWithoutSquares", "`HYBRID_…` over a `.process_group`, a 1-D `.mesh`, or neither",
     hybrids_without_squares},
    {"CopiesWithoutShards", "`NO_SHARD` over a 2-D `.mesh`",
     [] { return std::vector<FullyShardOptions>{{.strategy = NO_SHARD, .mesh = square()}}; }},
    {"Cubes", "any strategy over a `.mesh` of three dimensions", over_cubes},
    {"OtherRanks", "any strategy over a `.mesh` without this rank",
     [] {
       return changed({[](auto& options) { options.mesh = DeviceMesh(torch::kCPU, {1, 2}); }});
     }},
    {"GroupAndMesh", "`.process_group` with `.mesh`",
     [] {
       return changed({[](auto& options) {
         options.process_group = default_group();
         options.mesh = square();
       }});
     }},
    {"TrueOrFalse", "`.reshard_after_forward = true` or `false`, any strategy",
     [] {
       return changed({[](auto& options) { options.reshard_after_forward = true; },
                       [](auto& options) { options.reshard_after_forward = false; }});
     }},
    {"Divisor",
     "`.reshard_after_forward = N`, at least 2 and a divisor of the number of shards, any strategy",
     [] { return numbers({2}); }},
    {"NoDivisor", "`.reshard_after_forward = N`, at least 2 and no divisor",
     [] { return numbers({3, 8}); }},
    {"OneOrLess", "`.reshard_after_forward = 1`, `0` or less",
     [] { return numbers({1, 0, -1, -2}); }},
    {"Columns", "`.shard_placement_fn` that gives `Shard(dim)` or nothing, any strategy",
     [] {
       return changed({places(Shard(-1)), [](auto& options) {
                         options.shard_placement_fn = [](const at::Tensor&) {
                           return std::optional<Placement>();
                         };
                       }});
     }},
    {"OtherPlacements",
     "`.shard_placement_fn` that gives another placement, or a dimension that is not there",
     [] { return changed({places(Replicate()), places(Partial()), places(Shard(2))}); }},
    {"Offload", "`.cpu_offload`, any strategy",
     [] { return changed({[](auto& options) { options.cpu_offload = {true}; }}); }},
    {"AccumulateSharded", "`.accumulate_sharded`, any strategy",
     [] { return changed({[](auto& options) { options.accumulate_sharded = true; }}); }},
    {"ForwardPrefetch", "`.forward_prefetch`, any strategy",
     [] {
       return changed({[](auto& options) { options.forward_prefetch = true; },
                       [](auto& options) { options.forward_prefetch = false; }});
     }},
    {"MixedPrecisions", "`.mixed_precision`, any fields of it, any strategy",
     [] {
       return changed({compute_low,
                       [](auto& options) {
                         compute_low(options);
                         options.mixed_precision.full_precision_in_eval = true;
                         options.mixed_precision.module_classes_to_ignore = module_classes<>();
                         options.reshard_after_forward = 2;
                         options.accumulate_sharded = true;
                       },
                       [](auto& options) {
                         compute_low(options);
                         options.mixed_precision.reduce_dtype.reset();
                         options.mixed_precision.keep_low_precision_grads = true;
                       }});
     },
     kRounded},
    {"Start", "`.sync_module_states`, `.device_id`, `.param_init_fn`, any strategy",
     [] {
       return changed({[](auto& options) {
         options.sync_module_states = true;
         options.device_id = c10::Device(torch::kCPU);
         options.param_init_fn = [](torch::nn::Module&) {};
       }});
     }},
    {"OtherDevices", "`.device_id` that is neither an integer nor a `c10::Device`",
     [] { return changed({[](auto& options) { options.device_id = "cpu"; }}); }},
    {"Policies", "`.policy`, any strategy",
     [] {
       return changed({[](auto& options) { options.policy = ModuleWrapPolicy::of<BlockImpl>(); }});
     }},
    {"EmptyPolicies", "`.policy` without a function",
     [] { return changed({[](auto& options) { options.policy = CustomPolicy(nullptr); }}); }},
    {"IgnoredTwice", "`.ignored_modules` with `.ignored_states`",
     [] {
       const static Block other;
       return changed({[](auto& options) {
         options.ignored_modules = {other};
         options.ignored_states = {other->gain};
       }});
     }},
};

/// The table of the page: options, and what it says of them.
std::map<std::string, std::string> rows_of_the_page() {
  std::map<std::string, std::string> rows;
  std::ifstream page(TESSERA_FULLY_SHARD_PAGE);
  bool is_inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("#")) is_inside = line == "## Which options go together?";
    const auto bar = line.find(" | ");
    if (!is_inside || !line.starts_with("| ") || line.starts_with("| options |")) continue;
    rows[line.substr(2, bar - 2)] = line.substr(bar + 3, line.size() - bar - 5);
  }
  return rows;
}

TEST(FullyShardCombinations, AreThoseOfThePage) {
  std::vector<std::string> tried;
  for (const auto& row : kRows) tried.emplace_back(row.options);
  std::vector<std::string> written;
  for (const auto& [options, outcome] : rows_of_the_page()) written.push_back(options);
  EXPECT_THAT(written, ::testing::UnorderedElementsAreArray(tried));
}

Stack sharded(Stack net, const FullyShardOptions& options) {
  if (!options.policy.is_given()) return shard(net, options);
  return fully_shard(net, options);
}

/// Trains, adds two batches up, and evaluates.
void expect_trains(const FullyShardOptions& options, const Tolerance& tolerance) {
  auto [reference, net] = twins<Stack>(3);
  sharded(net, options);
  auto training = split_batch();
  training.steps = 2;
  training.tolerance = tolerance;
  training.optimizer = sgd(0.05);
  expect_training_parity(reference, net, training);
  for (auto* each : {&reference, &net}) (*each)->zero_grad();
  {
    const NoSync no_sync(net);
    net(own_batch(0)).square().mean().backward();
  }
  net(own_batch(1)).square().mean().backward();
  for (const int number : {0, 1}) reference(batch(number)).square().mean().backward();
  const auto expected = reference->named_parameters();
  for (const auto& item : net->named_parameters())
    expect_equal(whole(item.value().grad()).to(torch::kFloat), expected[item.key()].grad(),
                 item.key(), tolerance);
  net->eval();
  expect_equal(net(batch(2)), reference(batch(2)), "evaluated", tolerance);
}

void expect_refused(const FullyShardOptions& options, const std::string& text) {
  Block net;
  EXPECT_THAT(message_of<c10::Error>([&] { fully_shard(net, options); }), HasSubstr(text));
  EXPECT_FALSE(is_dtensor(net->gain)) << "nothing has happened";
  EXPECT_EQ(fully_shard_state(net), nullptr);
}

class FullyShardCombinationsOnThreads : public ::testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardCombinationsOnThreads, ::testing::ValuesIn(kRows),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(FullyShardCombinationsOnThreads, DoWhatThePageSays) {
  const auto outcome = rows_of_the_page()[GetParam().options];
  const std::string refused = "refused: `";
  if (!outcome.starts_with(refused)) {
    ASSERT_NE(outcome, "");
    return run_threads(4, [] {
      for (const auto& options : GetParam().make()) expect_trains(options, GetParam().tolerance);
    });
  }
  const auto begin = refused.size();
  const auto text = outcome.substr(begin, outcome.find('`', begin) - begin);
  const FakeWorld world(0, 4);
  for (const auto& options : GetParam().make()) expect_refused(options, text);
}

}  // namespace
}  // namespace tessera::testing
