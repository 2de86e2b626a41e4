// Where the batch is in the values of a step, operator by operator.
#include "compiler/spmd/batch_dims.h"

#include "recorded_steps.h"
#include "support/ranks.h"

#include <ATen/core/Reduction.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::compiler {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

/// A step on a batch `x` of eight rows of six, with weights that all ranks have.
class BatchDims : public ::testing::Test {
 protected:
  ValueId sharded(const at::Tensor& tensor, int64_t batch_dim = 0) {
    const auto value = steps_.input(tensor);
    steps_.graph.type(value).placement = Shard(batch_dim);
    return value;
  }
  ValueId whole(const at::Tensor& tensor) { return steps_.input(tensor); }
  ValueId parameter(const at::Tensor& tensor, const std::string& name) {
    const auto value = steps_.input(tensor);
    steps_.graph.inputs.back() = {value, InputKind::Parameter, name};
    return value;
  }

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
    find();
    EXPECT_EQ(steps_.graph.type(value).placement, wanted) << "%" << value << " of\n"
                                                          << steps_.graph;
  }

  /// Names of operators that mix samples, with what each rank computes.
  std::vector<std::string> mixes() {
    find();
    std::vector<std::string> found;
    for (const auto& mix : mixes_)
      found.push_back(steps_.graph.nodes[mix.node].op + ": " + mix.each_rank);
    return found;
  }
  void find() {
    if (!is_found_) mixes_ = find_batch_dims(steps_.graph, mesh_).mixes;
    is_found_ = true;
  }

  testing::FakeWorld world_{0, 2};
  DeviceMesh mesh_ = init_device_mesh(at::kCPU, {2}, {"dp"});
  Steps steps_;
  std::vector<SampleMix> mixes_;
  ValueId x_ = sharded(at::randn({8, 6}));
  bool is_found_ = false;
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

TEST_F(BatchDims, AreWhereTheyWereAfterAMix) {
  const auto sums = apply("aten::cumsum", {x_}, {0});  // over the batch
  const auto after = apply("aten::relu", {sums});
  expect(sums, Shard(0));
  expect(after, Shard(0));
  EXPECT_THAT(mixes(), ElementsAre("aten::cumsum: a scan of its own samples"));
}

TEST_F(BatchDims, AreFollowedThroughJoinedAndSplitDimensions) {
  const auto three = sharded(at::randn({3, 8, 5}), 1);
  const auto joined = apply("aten::view", {three}, {std::vector<int64_t>{24, 5}});
  const auto back = apply("aten::view", {joined}, {std::vector<int64_t>{3, 8, 5}});
  const auto outer = apply("aten::view", {x_}, {std::vector<int64_t>{48}});
  const auto split = apply("aten::view", {outer}, {std::vector<int64_t>{8, 6}});
  expect(joined, Shard(0));  // the batch lies inside
  expect(back, Shard(1));
  expect(outer, Shard(0));
  expect(split, Shard(0));
  EXPECT_THAT(mixes(), IsEmpty());
}

TEST_F(BatchDims, EndInMeansAndLosses) {
  const auto mean = apply("aten::mean", {x_});
  const auto loss = apply("aten::mse_loss", {x_, sharded(at::randn({8, 6}))});
  const auto summed =
      apply("aten::mse_loss", {x_, sharded(at::randn({8, 6}))}, {at::Reduction::Sum});
  const auto total = apply("aten::add.Tensor", {mean, loss});
  const auto scaled = apply("aten::mul.Tensor", {total, whole(at::ones({}))});
  expect(mean, Partial("avg"));
  expect(loss, Partial("avg"));
  expect(summed, Partial());
  expect(total, Partial("avg"));
  expect(scaled, Partial("avg"));
  EXPECT_THAT(mixes(), IsEmpty());
}

/// sum(x * mask) / sum(mask)
TEST_F(BatchDims, ShowMeansOverAPart) {
  const auto mask = sharded(at::ones({8, 6}));
  const auto part = apply("aten::sum", {apply("aten::mul.Tensor", {x_, mask})});
  apply("aten::div.Tensor", {part, apply("aten::sum", {mask})});
  EXPECT_THAT(mixes(), ElementsAre("aten::div.Tensor: a quotient of its own sums"));
}

TEST_F(BatchDims, ShowPairsOfSamples) {
  apply("aten::mm", {x_, apply("aten::t", {x_})});
  EXPECT_THAT(mixes(), ElementsAre("aten::mm: pairs of its own samples"));
}

TEST_F(BatchDims, ShowWhatIsTakenOverTheBatch) {
  apply("aten::_softmax", {x_}, {0, false});
  apply("aten::_log_softmax", {x_}, {0, false});
  apply("aten::logsumexp", {x_}, {std::vector<int64_t>{0}});
  apply("aten::linalg_vector_norm", {x_}, {2, std::vector<int64_t>{0}});
  apply("aten::var.correction", {x_}, {std::vector<int64_t>{0}});
  apply("aten::argmax", {x_}, {0});
  apply("aten::pow.Tensor_Scalar",
        {apply("aten::sum.dim_IntList", {x_}, {std::vector<int64_t>{0}})}, {2});
  EXPECT_THAT(mixes(), ElementsAre("aten::_softmax: shares among its own samples",
                                   "aten::_log_softmax: shares among its own samples",
                                   "aten::logsumexp: the sum over its own samples",
                                   "aten::linalg_vector_norm: the norm of its own samples",
                                   "aten::var.correction: the variance of its own samples",
                                   "aten::argmax: a place among its own samples",
                                   "aten::pow.Tensor_Scalar: it of the sum over its own samples"));
}

TEST_F(BatchDims, AreThoseOfForward) {
  const auto loss = apply("aten::sum", {apply("aten::_softmax", {x_}, {0, false})});
  const auto one = apply("aten::ones_like", {loss});
  const auto wide = apply("aten::expand", {one}, {std::vector<int64_t>{8, 6}});
  apply("aten::_softmax_backward_data", {wide, x_}, {0, at::kFloat});
  EXPECT_THAT(mixes(), ElementsAre("aten::_softmax: shares among its own samples"));
}

TEST_F(BatchDims, AreNotThoseOfParameters) {
  const auto weight = parameter(at::randn({8, 4}), "weight");
  apply("aten::mm", {apply("aten::t", {x_}), weight});  // 6 x 8, 8 x 4
  EXPECT_THAT([&] { find(); },
              ThrowsMessage<c10::ValueError>(
                  AllOf(HasSubstr("DataParallel: expected the batch of x0 along dimension 0 of its "
                                  "sizes [8, 6], but aten::mm matches that dimension with one of "
                                  "weight"),
                        HasSubstr("input_batch_dims"))));
}

}  // namespace
}  // namespace tessera::compiler
