// Where the batch is in the values of a step, operator by operator, and what is a rank's own.
#include "compiler/spmd/batch_dims.h"

#include "compiler/spmd/locality.h"
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
    if (is_found_) return;
    auto found = find_batch_dims(steps_.graph, mesh_);
    mixes_ = std::move(found.mixes);
    interleaved_ = std::move(found.interleaved);
    is_found_ = true;
  }
  bool is_interleaved(ValueId value) {
    find();
    return interleaved_.at(static_cast<size_t>(value));
  }

  testing::FakeWorld world_{0, 2};
  DeviceMesh mesh_ = init_device_mesh(at::kCPU, {2}, {"dp"});
  Steps steps_;
  std::vector<SampleMix> mixes_;
  std::vector<bool> interleaved_;
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
  EXPECT_THAT(mixes(), IsEmpty());
}

TEST_F(BatchDims, GoThroughWritesAndParts) {
  const auto written = apply("aten::relu_", {apply("aten::clone", {x_})});
  const auto part = apply("aten::slice.Tensor", {x_}, {0, 1, 3});  // of each rank's samples
  const auto soft = apply("aten::_softmax", {written}, {0, false});
  expect(written, Shard(0));
  expect(part, Shard(0));
  expect(soft, Shard(0));
  EXPECT_THAT(mixes(), ElementsAre("aten::_softmax: shares among its own samples"));
}

/// Tensors of a list have nothing to do with each other.
TEST_F(BatchDims, AreThoseOfEachTensorOfAList) {
  const auto list = std::vector{x_, whole(at::randn({4, 6}))};
  const auto doubled =
      steps_.lists("aten::_foreach_mul.Scalar", {Argument::of(list), Argument::of(c10::IValue(2))});
  expect(doubled[0], Shard(0));
  EXPECT_THAT(mixes(), IsEmpty());
}

TEST_F(BatchDims, AreGuessedByLength) {
  const auto square = sharded(at::randn({8, 8}), 1), turned = sharded(at::randn({6, 8}), 1);
  const auto sums = apply("aten::cumsum", {square}, {1});
  const std::vector<int64_t> sizes = {8, 6, 8}, strides = {1, 8, 0};
  const auto first = apply("aten::as_strided", {turned}, {sizes, strides});
  expect(sums, Shard(1));   // where it was
  expect(first, Shard(0));  // the first that is as long
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
  EXPECT_TRUE(is_interleaved(joined));
  EXPECT_FALSE(is_interleaved(back) || is_interleaved(outer) || is_interleaved(split));
  EXPECT_THAT(mixes(), IsEmpty());
}

/// The sizes of views don't show where one sample is: with what is before it, if all behind stays.
TEST_F(BatchDims, AreFollowedThroughViewsOfOneSample) {
  const auto view = [&](ValueId of, std::vector<int64_t> sizes) {
    return apply("aten::view", {of}, {std::move(sizes)});
  };
  const auto one = sharded(at::randn({3, 1, 4}), 1);  // [positions, batch, width]
  const auto joined = view(one, {3, 4});              // of a linear layer
  const auto heads = view(one, {3, 2, 2});            // [positions, batch * heads, width]
  const auto first = sharded(at::randn({1, 3, 4}));
  const auto bias = apply("aten::add.Tensor", {one, whole(at::ones({3, 1, 4}))});
  const auto flat = view(first, {3, 4}), split = view(flat, {1, 3, 4});
  const auto inner = {heads, bias, view(joined, {3, 1, 4}), view(heads, {3, 1, 4}),
                      view(one, {3, 1, 2, 2})};
  for (const auto value : {joined, flat, split}) expect(value, Shard(0));
  for (const auto value : inner) expect(value, Shard(1));
  EXPECT_TRUE(is_interleaved(joined));
  EXPECT_FALSE(is_interleaved(flat));
  EXPECT_THAT(mixes(), IsEmpty());
}

TEST_F(BatchDims, EndInMeansAndLosses) {
  const auto mean = apply("aten::mean", {x_});
  const auto loss = apply("aten::mse_loss", {x_, sharded(at::randn({8, 6}))});
  const auto summed =
      apply("aten::mse_loss", {x_, sharded(at::randn({8, 6}))}, {at::Reduction::Sum});
  const auto total = apply("aten::add.Tensor", {mean, loss});
  const auto scaled = apply("aten::mul.Tensor", {total, whole(at::ones({}))});
  const auto regular = apply("aten::add.Tensor", {total, whole(at::ones({}))});
  expect(mean, Partial("avg"));
  expect(loss, Partial("avg"));
  expect(summed, Partial());
  expect(total, Partial("avg"));
  expect(scaled, Partial("avg"));
  expect(regular, Partial("avg"));
  EXPECT_THAT(mixes(), IsEmpty());
}

/// The mean of x + c over ranks is that of x, plus c.
TEST_F(BatchDims, LetConstantsBesideMeans) {
  const auto mean = apply("aten::mean", {x_});
  const auto more = apply("aten::add.Scalar", {mean}, {2.0});
  const auto less = apply("aten::sub.Scalar", {more}, {0.5});
  const auto turned = apply("aten::rsub.Scalar", {less}, {1.0});
  const auto literal = apply("aten::add.Tensor", {turned, whole(at::ones({}))});
  steps_.graph.nodes.back().arguments[1] = Argument::of(c10::IValue(1.0));
  const auto shifted = apply("aten::add.Scalar", {x_}, {2.0});
  for (const auto value : {more, less, turned, literal}) expect(value, Partial("avg"));
  expect(shifted, Shard(0));
  EXPECT_THAT(mixes(), IsEmpty());
}

/// x[:, 1:3] = y, through the memory of x.
TEST_F(BatchDims, AreKeptWhereAPartIsWritten) {
  const auto write = [&](ValueId to, ValueId from, std::vector<int64_t> sizes,
                         std::vector<int64_t> strides) {
    return apply("tessera::window_scatter", {to, from}, {sizes, strides, 1});
  };
  const auto two = sharded(at::randn({8, 2})), turned = sharded(at::randn({2, 8}), 1);
  const auto made = call("aten::zeros", {std::vector<int64_t>{8, 6}});
  const auto columns = write(x_, two, {8, 2}, {6, 1});
  const auto other = write(x_, turned, {2, 8}, {1, 6});
  const auto literal = write(x_, whole(at::zeros({2})), {2}, {1});
  const auto filled = write(made, two, {8, 2}, {6, 1});
  const auto mean =
      write(call("aten::zeros", {std::vector<int64_t>{3}}), apply("aten::mean", {x_}), {}, {});
  for (const auto value : {columns, other, literal, filled}) expect(value, Shard(0));
  expect(mean, Partial("avg"));
  EXPECT_THAT(mixes(), IsEmpty());
}

/// Samples of one batch in columns of another, a sum beside constants.
TEST_F(BatchDims, ShowWhatIsWrittenAcrossSamples) {
  const auto square = sharded(at::randn({8, 8})), turned = sharded(at::randn({8, 8}), 1);
  const std::vector<int64_t> sizes = {8, 8}, strides = {8, 1};
  apply("tessera::window_scatter", {square, turned}, {sizes, strides, 0});
  apply("tessera::window_scatter", {whole(at::zeros({3})), apply("aten::sum", {x_})},
        {std::vector<int64_t>{}, std::vector<int64_t>{}, 0});
  EXPECT_THAT(mixes(), ElementsAre("tessera::window_scatter: it of its own samples alone",
                                   "tessera::window_scatter: it of its own samples alone"));
}

/// sum(x * mask) / sum(mask)
TEST_F(BatchDims, ShowMeansOverAPart) {
  const auto mask = sharded(at::ones({8, 6}));
  const auto part = apply("aten::sum", {apply("aten::mul.Tensor", {x_, mask})});
  apply("aten::div.Tensor", {part, apply("aten::sum", {mask})});
  EXPECT_THAT(mixes(), ElementsAre("aten::div.Tensor: a quotient of its own sums"));
}

/// Every rank would add it.
TEST_F(BatchDims, ShowWhatIsAddedToASum) {
  apply("aten::add.Tensor", {apply("aten::sum", {x_}), whole(at::ones({}))});
  apply("aten::sub.Tensor", {apply("aten::sum", {x_}), whole(at::ones({}))});
  steps_.graph.nodes.back().arguments[1] = Argument::of(c10::IValue(1.0));  // a literal
  EXPECT_THAT(mixes(), ElementsAre("aten::add.Tensor: it of the sum over its own samples",
                                   "aten::sub.Tensor: it of the sum over its own samples"));
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

/// Ones are a constant of forward as well.
TEST_F(BatchDims, AreThoseOfForwardBehindOnes) {
  const auto ones = apply("aten::ones_like", {x_});
  const auto one = apply("aten::ones_like", {call("aten::zeros", {std::vector<int64_t>{}})});
  apply("aten::_softmax", {apply("aten::mul.Tensor", {x_, ones})}, {0, false});
  apply("aten::cumsum", {apply("aten::mul.Tensor", {x_, one})}, {0});
  EXPECT_THAT(mixes(), ElementsAre("aten::_softmax: shares among its own samples",
                                   "aten::cumsum: a scan of its own samples"));
}

TEST_F(BatchDims, NameTheInputThatTheyCameWith) {
  const auto other = sharded(at::randn({6, 8}), 1);
  const auto weight = parameter(at::randn({5, 8}), "weight");
  apply("aten::mm", {apply("aten::relu", {other}), apply("aten::t", {weight})});
  EXPECT_THAT([&] { find(); }, ThrowsMessage<c10::ValueError>(HasSubstr(
                                   "expected the batch of x1 along dimension 1 of its sizes "
                                   "[6, 8], but aten::mm matches that dimension with one of "
                                   "weight")));
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

/// Views leave unsure where it is.
TEST_F(BatchDims, OfOneSampleAreNotRefused) {
  const auto one = sharded(at::randn({1, 6})), weight = parameter(at::randn({1, 4}), "weight");
  apply("aten::mm", {apply("aten::t", {one}), weight});
  EXPECT_THAT(mixes(), ElementsAre("aten::mm: pairs of its own samples"));
  EXPECT_THAT(
      [&] { find_batch_dims(steps_.graph, mesh_, /*refuses_one=*/true); },
      ThrowsMessage<c10::ValueError>(HasSubstr("matches that dimension with one of weight")));
}

/// The same step: what depends on the rank's part of the batch.
class LocalValues : public BatchDims {
 protected:
  bool is_local(ValueId value) const { return Locality(steps_.graph).is_local(value); }
  ValueId buffer(const at::Tensor& tensor) {
    const auto value = steps_.input(tensor);
    steps_.graph.inputs.back() = {value, InputKind::Buffer, "buffer"};
    return value;
  }
  ValueId mark(ValueId gradient, ValueId of) { return apply("tessera::gradient", {gradient, of}); }

  ValueId weight_ = parameter(at::randn({6, 6}), "weight");
  ValueId gradient_ = apply("aten::mm", {apply("aten::t", {x_}), x_});
};

TEST_F(LocalValues, DependOnTheBatch) {
  const auto group = mesh_.group()->getGroupName();
  const auto alike = whole(at::randn({6})), own = whole(at::randn({6}));
  steps_.graph.type(alike).placement = Replicate();  // an argument without a batch
  EXPECT_TRUE(is_local(apply("aten::mm", {x_, weight_})));
  EXPECT_TRUE(is_local(apply("aten::relu", {own})));
  EXPECT_FALSE(is_local(apply("aten::relu", {alike})));
  EXPECT_FALSE(is_local(apply("aten::relu", {weight_})));
  EXPECT_FALSE(is_local(apply("aten::ones_like", {x_})));
  EXPECT_FALSE(is_local(apply("_c10d_functional::all_reduce", {x_}, {"sum", group})));
}

TEST_F(LocalValues, AreGoneOnceOverwritten) {
  EXPECT_FALSE(is_local(apply("aten::copy", {gradient_, weight_})));
  EXPECT_TRUE(is_local(apply("aten::copy", {weight_, gradient_})));
}

/// The next call reads what this one writes.
TEST_F(LocalValues, AreInBuffersThatGetThem) {
  const auto statistics = buffer(at::ones({6})), table = buffer(at::ones({6}));
  const auto scaled = apply("aten::mul.Tensor", {weight_, statistics});
  const auto other = apply("aten::mul.Tensor", {weight_, table});
  EXPECT_FALSE(is_local(scaled));
  const auto mean = apply("aten::mean.dim", {x_}, {std::vector<int64_t>{0}});
  steps_.graph.outputs.push_back({mean, OutputKind::Write, statistics});
  EXPECT_TRUE(is_local(scaled));
  EXPECT_FALSE(is_local(other));
}

TEST_F(LocalValues, AreGradientsToWhichAnotherBackwardAdds) {
  const auto adds = [&](ValueId first, double alpha = 1) {
    return apply("aten::add.Tensor", {first, gradient_}, {alpha});
  };
  const auto summand = mark(gradient_, weight_);
  const auto sum = mark(adds(summand), weight_);
  const auto scaled = mark(gradient_, weight_);
  mark(adds(scaled, 2), weight_);
  const auto seen = mark(gradient_, weight_);
  mark(adds(seen), weight_);
  apply("aten::relu", {seen});
  const auto of_another = mark(gradient_, weight_);
  mark(adds(of_another), parameter(at::randn({6, 6}), "another"));
  EXPECT_TRUE(is_local(summand));
  for (const auto averaged : {sum, scaled, seen, of_another}) EXPECT_FALSE(is_local(averaged));
}

}  // namespace
}  // namespace tessera::compiler
