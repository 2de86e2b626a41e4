// linear_cross_entropy of a head whose classes are sharded: equal to the plain one, without logits
// of all classes on any rank.
#include <tessera/nn.h>

#include "compose/on_device.h"
#include "nn/decoder_formulas.h"
#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/sub_tests.h"

#include <gmock/gmock.h>

#include <cmath>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using HeadOptions = nn::LinearCrossEntropyOptions;

struct ShardedHead {
  at::Tensor input, weight, bias, target;
  DeviceMesh mesh = mesh_of_all(run_device().type());

  static ShardedHead plain(int64_t classes, int64_t ignore_index = -100) {
    const auto leaf = [](at::IntArrayRef sizes, uint64_t seed) {
      return drawn_on_device(sizes, seed).to(at::kDouble).requires_grad_();
    };
    auto target = at::randint(classes, {2, 6}, at::detail::createCPUGenerator(4), at::kLong);
    target[0][1] = ignore_index;
    return {leaf({2, 6, 5}, 1), leaf({classes, 5}, 2), leaf({classes}, 3), target.to(run_device())};
  }
  ShardedHead sharded() const {
    const auto shard = [&](const at::Tensor& whole) {
      return distribute_tensor(whole.detach(), mesh, {Shard(0)}).requires_grad_();
    };
    return {input.detach().requires_grad_(), shard(weight), shard(bias), target};
  }
  at::Tensor loss(HeadOptions options, const at::Tensor& given = {}) const {
    options.bias = bias;
    return nn::linear_cross_entropy(given.defined() ? given : input, weight, target, options);
  }
};

void expect_same_loss(int64_t classes, const HeadOptions& options,
                      const std::optional<Placements>& placed = std::nullopt) {
  const auto plain = ShardedHead::plain(classes, options.ignore_index);
  const auto parallel = plain.sharded();
  // Such as what comes from a layer under sequence parallelism.
  const auto given = placed
                         ? DTensor::from_local(parallel.input, parallel.mesh).redistribute(*placed)
                         : at::Tensor();
  const auto expected = plain.loss(options);
  comm_debug counted;
  const auto loss = parallel.loss(options, given);
  EXPECT_FALSE(is_dtensor(loss));
  if (!placed) {
    EXPECT_EQ(counted.counts().count("all_gather"), 0U) << counted.to_string();
  }
  const Tolerance tolerance{1e-12, 1e-12};
  expect_equal(loss.detach(), expected.detach(), "loss", tolerance);
  const auto upstream = drawn_on_device(expected.sizes(), 5).to(at::kDouble);
  expected.backward(upstream);
  loss.backward(upstream);
  EXPECT_EQ(DTensor::of(parallel.weight.grad()).placements(), Placements{Shard(0)});
  expect_equal(parallel.input.grad(), plain.input.grad(), "input", tolerance);
  expect_equal(full_value(parallel.weight.grad()), plain.weight.grad(), "weight", tolerance);
  expect_equal(full_value(parallel.bias.grad()), plain.bias.grad(), "bias", tolerance);
}

void expect_every_form() {
  for (const int64_t classes : {16, 11}) {
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
      expect_same_loss(classes, {.reduction = reduction});
      expect_same_loss(classes, {.ignore_index = 1, .reduction = reduction, .chunk_rows = 5},
                       Placements{Shard(1)});
    }
  }
}

class ShardedLinearCrossEntropy : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, ShardedLinearCrossEntropy,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ShardedLinearCrossEntropy, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(ShardedLinearCrossEntropy, EqualsThatOfAllClasses) {
  for (const int ranks : {2, 4}) run(ranks, expect_every_form);
}
TEST(ShardedLinearCrossEntropyOnThreads, EqualsThatOfAllClasses) {
  run_threads(3, expect_every_form);
}

// By its own classes the first rank would take 15 rows at a time, the second all 16.
TEST_P(ShardedLinearCrossEntropy, RanksOfUnevenShardsMakeTheSameBlocks) {
  run(2, [] {
    constexpr int64_t kClasses = (int64_t{1} << 21) + 1;
    const auto weight = at::zeros({kClasses, 1}, at::TensorOptions(run_device()));
    const auto sharded = distribute_tensor(weight, mesh_of_all(run_device().type()), {Shard(0)});
    const auto target = at::arange(16, weight.options().dtype(at::kLong));
    const auto loss =
        nn::linear_cross_entropy(at::ones({16, 1}, weight.options()), sharded, target);
    EXPECT_NEAR(loss.item<double>(), std::log(static_cast<double>(kClasses)), 1e-3);
  });
}

TEST_P(ShardedLinearCrossEntropy, RefusesWhatItCantCompute) {
  run(2, [] {
    const auto plain = ShardedHead::plain(8);
    const auto mesh = plain.mesh;
    const auto refused = [&](const at::Tensor& weight, const at::Tensor& bias = {}) {
      return [&plain, weight, bias] {
        nn::linear_cross_entropy(plain.input, weight, plain.target, {.bias = bias});
      };
    };
    const auto placed = [&](const at::Tensor& whole, const Placement& placement) {
      return distribute_tensor(whole.detach(), mesh, {placement});
    };
    for (const auto& placement : {Placement(Replicate()), Placement(Shard(1))}) {
      EXPECT_THAT(message_of<c10::NotImplementedError>(refused(placed(plain.weight, placement))),
                  AllOf(HasSubstr("linear_cross_entropy: expected a weight whose classes are "
                                  "sharded over a 1-D mesh"),
                        HasSubstr("use cross_entropy under loss_parallel")));
    }
    const auto sharded = placed(plain.weight, Shard(0));
    EXPECT_THAT(message_of<c10::TypeError>(refused(sharded, plain.bias)),
                HasSubstr("expected the weight, and its bias, to be DTensors"));
    EXPECT_THAT(message_of(refused(sharded, placed(plain.bias, Replicate()))),
                HasSubstr("expected a bias placed as the weight"));
    EXPECT_THAT(message_of(refused(placed(plain.weight.narrow(0, 0, 1).clone(), Shard(0)))),
                HasSubstr("expected at least one class on each rank, got 1 on 2 ranks"));
    EXPECT_THAT(message_of<c10::TypeError>([&] {
                  nn::linear_cross_entropy(placed(plain.input, Replicate()), plain.weight,
                                           plain.target);
                }),
                HasSubstr("expected the weight, and its bias, to be DTensors"));
    if (run_device().is_cpu()) {
      EXPECT_THAT(message_of<c10::IndexError>([&] {
                    nn::linear_cross_entropy(plain.input, sharded, plain.target.abs() + 8,
                                             {.ignore_index = 100});
                  }),
                  HasSubstr("out of bounds"));
    }
  });
}

// What the head is given: layers whose heads and hidden features are sharded.
TEST_P(ShardedLinearCrossEntropy, TrainsADecoderThatIsShardedWithIt) {
  run(2, [] {
    const auto mesh = mesh_of_all(run_device().type());
    const auto make = [] {
      auto decoder = seeded(1, [] { return Decoder(DecoderSizes{}); });
      decoder->to(run_device(), at::kDouble);
      return decoder;
    };
    auto plain = make(), parallel = make();
    parallelize_module(parallel, mesh,
                       {{"layers.*.self_attn.[qkv]_proj", ColwiseParallel()},
                        {"layers.*.self_attn.o_proj", RowwiseParallel()},
                        {"layers.*.mlp.gate_proj", ColwiseParallel()},
                        {"layers.*.mlp.up_proj", ColwiseParallel()},
                        {"layers.*.mlp.down_proj", RowwiseParallel()}});
    const auto x = drawn_on_device({2, 7, 32}, 1).to(at::kDouble);
    const auto whole = drawn_on_device({10, 32}, 2).to(at::kDouble);
    const auto weight = distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_();
    const auto target =
        at::randint(10, {2, 7}, at::detail::createCPUGenerator(4), at::kLong).to(run_device());
    const auto expected = nn::linear_cross_entropy(plain(x), whole, target);
    const auto loss = nn::linear_cross_entropy(parallel(x), weight, target);
    const Tolerance tolerance{1e-12, 1e-12};
    expect_equal(loss.detach(), expected.detach(), "loss", tolerance);
    expected.backward();
    loss.backward();
    for (const auto& item : plain->named_parameters()) {
      expect_equal(full_value(get_parameter(parallel, item.key()).grad()), item.value().grad(),
                   item.key(), tolerance);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
