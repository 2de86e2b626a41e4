// Of which values of a step ranks have rows and which they have as a whole, where parameters are
// sharded; and which style is chosen for a step.
#include "compiler/spmd/expand.h"

#include "compiler/spmd/data_parallel.h"
#include "recorded_steps.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tessera::compiler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A step on a batch, with a parameter and a buffer of six rows and an averaged gradient.
class Expanded : public ::testing::Test {
 protected:
  ValueId input(InputKind kind, const at::Tensor& tensor, const std::string& name) {
    const auto value = steps_.input(tensor);
    steps_.graph.inputs.back() = {value, kind, name};
    return value;
  }
  ValueId apply(const std::string& op, const std::vector<ValueId>& values) {
    std::vector<Argument> given;
    for (const auto value : values) given.push_back(Argument::of(value));
    return steps_.call(op, std::move(given));
  }

  const Node& node(const std::string& op) const {
    const auto& nodes = steps_.graph.nodes;
    return *std::find_if(nodes.begin(), nodes.end(),
                         [&](const Node& each) { return each.op == op; });
  }
  /// Of the operands of an operator, in the step of the first of two ranks.
  std::vector<int64_t> rows(const std::string& op) {
    if (!is_expanded_)
      expand_to_spmd(steps_.graph, {.group = "dp", .ranks = 2, .rank = 0, .shards = true});
    is_expanded_ = true;
    std::vector<int64_t> found;
    for (const auto value : node(op).used()) {
      const auto& sizes = steps_.graph.type(value).sizes;
      found.push_back(sizes.empty() ? 0 : sizes[0]);
    }
    return found;
  }

  Steps steps_;
  bool is_expanded_ = false;
  ValueId x_ = steps_.input(at::randn({8, 6}));
  ValueId weight_ = input(InputKind::Parameter, at::randn({6, 6}), "weight");
  ValueId table_ = input(InputKind::Buffer, at::randn({6, 6}), "table");
  ValueId averaged_ =
      apply("tessera::gradient", {apply("aten::mm", {apply("aten::t", {x_}), x_}), weight_});
};

TEST_F(Expanded, UpdatesWorkOnRows) {
  apply("aten::mul.Tensor", {averaged_, table_});
  apply("aten::sub.Tensor", {weight_, averaged_});
  EXPECT_THAT(rows("aten::mul.Tensor"), ElementsAre(3, 3));
  EXPECT_THAT(rows("aten::sub.Tensor"), ElementsAre(3, 3));
}

/// Buffers need not be alike on all ranks.
TEST_F(Expanded, ParametersMeetBuffersAsAWhole) {
  apply("aten::mul.Tensor", {weight_, table_});
  apply("aten::div.Tensor", {apply("aten::sub.Tensor", {weight_, averaged_}), table_});
  EXPECT_THAT(rows("aten::mul.Tensor"), ElementsAre(6, 6));
  EXPECT_THAT(rows("aten::div.Tensor"), ElementsAre(6, 6));
}

/// A rank's own loss, beside a list.
TEST_F(Expanded, ListsMeetTheBatchAsAWhole) {
  const auto loss = apply("aten::sum", {x_});
  steps_.lists("aten::_foreach_mul.Tensor",
               {Argument::of(std::vector{weight_}), Argument::of(loss)});
  EXPECT_THAT(rows("aten::_foreach_mul.Tensor"), ElementsAre(6, 0));
}

TEST_F(Expanded, NumbersAreDrawnForAllRows) {
  apply("aten::rrelu", {weight_});
  EXPECT_THAT(rows("aten::rrelu"), ElementsAre(6));
}

/// As the results of operators on rows are said to be.
TEST_F(Expanded, RowsAreContiguous) {
  const auto turned = input(InputKind::Buffer, at::randn({6, 6}).t(), "turned");
  apply("aten::mul.Tensor", {turned, averaged_});
  EXPECT_THAT(rows("aten::mul.Tensor"), ElementsAre(3, 3));
  EXPECT_TRUE(steps_.graph.type(node("aten::mul.Tensor").used()[0]).is_contiguous());
}

Graph step_of(std::vector<int64_t> parameter) {
  Graph graph;
  const auto strides = c10::TensorType::contiguousStridesOf(parameter);
  const auto value =
      graph.add_value({.dtype = at::kFloat, .sizes = std::move(parameter), .strides = strides});
  graph.inputs.push_back({value, InputKind::Parameter, "weight"});
  return graph;
}

TEST(ChosenStyle, ShardsWhereThatSavesMemory) {
  const testing::FakeWorld world(0, 2);
  const auto mesh = init_device_mesh(at::kCPU, {2});
  constexpr int64_t kBytes = 10 * 6 * 4 * 2;  // with the gradient
  EXPECT_FALSE(choose_style(step_of({10, 6}), mesh, kBytes).shards);
  EXPECT_TRUE(choose_style(step_of({10, 6}), mesh, kBytes - 1).shards);
  EXPECT_FALSE(choose_style(step_of({1, 60}), mesh, 0).shards);  // one row
  const auto why = choose_style(step_of({10, 6}), mesh, kBytes).why;
  EXPECT_THAT(why, HasSubstr("take 480 B on each rank if replicated, 240 B if sharded"));
  long replicated = 0, sharded = 0;
  const auto costs = why.substr(why.find("messages cost"));
  ASSERT_EQ(std::sscanf(costs.c_str(), "messages cost %ld against %ld", &replicated, &sharded), 2);
  EXPECT_GT(replicated, 0);
  EXPECT_GE(sharded, replicated);  // one message more
}

/// Half of what is free, of which two ranks of one host have a half each.
TEST(ChosenStyleRanks, SharesTheMemoryOfAHost) {
  testing::run_processes(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto free_bytes = static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    const auto shards = [&](int64_t bytes) {  // of parameter and gradient
      return choose_style(step_of({bytes / 8 / 64, 64}), mesh, std::nullopt).shards;
    };
    EXPECT_TRUE(shards(free_bytes / 5 * 2));
    EXPECT_FALSE(shards(free_bytes / 6));
  });
}

}  // namespace
}  // namespace tessera::compiler
