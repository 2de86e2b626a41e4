// Where the batch is in the values of a step, operator by operator.
#include "compiler/spmd/batch_dims.h"

#include "recorded_steps.h"

#include <gtest/gtest.h>

namespace tessera::compiler {
namespace {

/// A step on a batch `x` of eight rows of six, with weights that all ranks have.
class BatchDims : public ::testing::Test {
 protected:
  ValueId sharded(const at::Tensor& tensor, int64_t batch_dim = 0) {
    const auto value = steps_.input(tensor);
    steps_.graph.type(value).placement = Shard(batch_dim);
    return value;
  }
  ValueId whole(const at::Tensor& tensor) { return steps_.input(tensor); }

  ValueId call(const std::string& op, std::vector<c10::IValue> arguments) {
    std::vector<Argument> given;
    for (auto& argument : arguments) given.push_back(Argument::of(std::move(argument)));
    return steps_.call(op, std::move(given));
  }
  ValueId apply(const std::string& op, std::vector<ValueId> values,
                std::vector<c10::IValue> further = {}) {
    std::vector<Argument> given;
    for (const auto value : values) given.push_back(Argument::of(value));
    for (auto& argument : further) given.push_back(Argument::of(std::move(argument)));
    return steps_.call(op, std::move(given));
  }

  void expect(ValueId value, std::optional<Placement> wanted) {
    if (!is_noted_) note_batch_dims(steps_.graph);
    is_noted_ = true;
    EXPECT_EQ(steps_.graph.type(value).placement, wanted) << "%" << value << " of\n"
                                                          << steps_.graph;
  }

  Steps steps_;
  ValueId x_ = sharded(at::randn({8, 6}));
  bool is_noted_ = false;
};

TEST_F(BatchDims, GoThroughALinearLayer) {
  const auto weight = whole(at::randn({4, 6})), bias = whole(at::randn({4}));
  const auto turned = apply("aten::t", {weight});
  const auto out = apply("aten::addmm", {bias, x_, turned});
  const auto active = apply("aten::relu", {out});
  const auto gradient = apply("aten::mm", {apply("aten::t", {active}), x_});
  expect(turned, Replicate());
  expect(out, Shard(0));
  expect(active, Shard(0));
  expect(gradient, Partial());
}

TEST_F(BatchDims, MoveWithDimensions) {
  const auto turned = apply("aten::t", {x_});
  const auto three = apply("aten::unsqueeze", {turned}, {0});
  const auto flat = apply("aten::view", {x_}, {std::vector<int64_t>{8, 2, 3}});
  expect(turned, Shard(1));
  expect(three, Shard(2));
  expect(flat, Shard(0));
}

TEST_F(BatchDims, EndInSums) {
  const auto features = apply("aten::sum.dim_IntList", {x_}, {std::vector<int64_t>{1}});
  const auto rows = apply("aten::sum.dim_IntList", {x_}, {std::vector<int64_t>{0}});
  expect(features, Shard(0));
  expect(rows, Partial());
}

TEST_F(BatchDims, GoThroughNormsSoftmaxEmbeddingsAndConvolutions) {
  const auto soft = apply("aten::_softmax", {x_}, {1, false});
  const auto words = sharded(at::zeros({8, 3}, at::kLong));
  const auto looked_up = apply("aten::embedding", {whole(at::randn({5, 4})), words});
  const auto image = sharded(at::randn({8, 3, 5, 5})), kernel = whole(at::randn({2, 3, 3, 3}));
  std::vector<Argument> convolution = {Argument::of(image), Argument::of(kernel),
                                       Argument::of(c10::IValue())};
  for (const auto& each :
       {c10::IValue(std::vector<int64_t>{1, 1}), c10::IValue(std::vector<int64_t>{0, 0}),
        c10::IValue(std::vector<int64_t>{1, 1}), c10::IValue(false),
        c10::IValue(std::vector<int64_t>{0, 0}), c10::IValue(1)})
    convolution.push_back(Argument::of(each));
  const auto convolved = steps_.call("aten::convolution", convolution);
  expect(soft, Shard(0));
  expect(looked_up, Shard(0));
  expect(convolved, Shard(0));
}

/// zeros({x.size(0), 6}) has this rank's rows.
TEST_F(BatchDims, TakeWhatIsMadeInside) {
  const auto made = call("aten::zeros", {std::vector<int64_t>{8, 6}});
  const auto sum = apply("aten::add.Tensor", {x_, made});
  expect(made, std::nullopt);
  expect(sum, Shard(0));
}

TEST_F(BatchDims, AreNotGuessed) {
  const auto sorted = apply("aten::cumsum", {x_}, {0});  // over the batch
  expect(sorted, std::nullopt);
  expect(apply("aten::relu", {sorted}), std::nullopt);
}

}  // namespace
}  // namespace tessera::compiler
