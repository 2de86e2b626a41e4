// linear_cross_entropy against cross_entropy of linear: losses, gradients, memory, errors.
#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/nn.h>

#include "compose/on_device.h"
#include "counted_memory.h"
#include "support/message_of.h"
#include "support/tolerance.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using HeadOptions = nn::LinearCrossEntropyOptions;

constexpr Tolerance kHeadTolerance{1e-12, 1e-12};

class LinearCrossEntropy : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCpu, LinearCrossEntropy,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {1})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, LinearCrossEntropy, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

struct Head {
  at::Tensor input, weight, bias, target;

  std::vector<at::Tensor> leaves() const { return {input, weight, bias}; }
};

/// 3 x 7 rows, 5 features, 11 classes; two targets are ignored.
Head made_head(at::ScalarType dtype, int64_t ignore_index = -100) {
  const auto leaf = [&](at::IntArrayRef sizes, uint64_t seed) {
    return drawn_on_device(sizes, seed).to(dtype).requires_grad_();
  };
  auto target = at::randint(11, {3, 7}, at::detail::createCPUGenerator(4), at::kLong);
  target[0][3] = ignore_index;
  target[2][6] = ignore_index;
  return {leaf({3, 7, 5}, 1), leaf({11, 5}, 2), leaf({11}, 3), target.to(run_device())};
}

at::Tensor formula(const Head& head, const HeadOptions& options) {
  const auto logits = at::linear(head.input, head.weight, options.bias);
  const auto losses = at::cross_entropy_loss(logits.flatten(0, -2), head.target.flatten(), {},
                                             options.reduction, options.ignore_index);
  return options.reduction == at::Reduction::None ? losses.view(head.target.sizes()) : losses;
}

at::Tensor loss_of(const Head& head, const HeadOptions& options) {
  return nn::linear_cross_entropy(head.input, head.weight, head.target, options);
}

/// Of the leaves; what was not asked for is undefined.
std::vector<at::Tensor> gradients_of(const at::Tensor& loss, const Head& head) {
  const auto upstream = drawn_on_device(loss.sizes(), 9).to(loss.scalar_type());
  return torch::autograd::grad({loss}, head.leaves(), {upstream}, {}, false, true);
}

void expect_as_formula(const Head& head, const HeadOptions& options) {
  const auto loss = loss_of(head, options), expected = formula(head, options);
  expect_equal(loss.detach(), expected.detach(), "loss", kHeadTolerance);
  const auto got = gradients_of(loss, head), wanted = gradients_of(expected, head);
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), wanted[i].defined()) << i;
    if (got[i].defined())
      expect_equal(got[i], wanted[i], "gradient " + std::to_string(i), kHeadTolerance);
  }
}

const std::vector<at::Reduction::Reduction> kReductions = {at::Reduction::Mean, at::Reduction::Sum,
                                                           at::Reduction::None};

TEST_P(LinearCrossEntropy, IsCrossEntropyOfLinear) {
  run([] {
    const auto head = made_head(at::kDouble);
    for (const auto reduction : kReductions) {
      for (const auto& chunk_rows :
           std::vector<std::optional<int64_t>>{1, 4, 20, 21, 1000, std::nullopt}) {
        expect_as_formula(head, {.reduction = reduction, .chunk_rows = chunk_rows});
        expect_as_formula(head,
                          {.bias = head.bias, .reduction = reduction, .chunk_rows = chunk_rows});
      }
    }
  });
}

TEST_P(LinearCrossEntropy, IgnoresTheIndexItIsTold) {
  run([] {
    for (const auto reduction : kReductions)
      expect_as_formula(made_head(at::kDouble, 3),
                        {.ignore_index = 3, .reduction = reduction, .chunk_rows = 5});
  });
}

TEST_P(LinearCrossEntropy, GivesNanAndNoGradientIfAllAreIgnored) {
  run([] {
    auto head = made_head(at::kDouble);
    head.target.fill_(-100);
    EXPECT_TRUE(std::isnan(loss_of(head, {}).item<double>()));
    for (const auto reduction : kReductions)
      expect_as_formula(head, {.bias = head.bias, .reduction = reduction, .chunk_rows = 5});
  });
}

TEST_P(LinearCrossEntropy, TakesNoRowsAndOneRow) {
  run([] {
    const auto head = made_head(at::kDouble);
    const Head none{head.input.slice(1, 0, 0), head.weight, head.bias, head.target.slice(1, 0, 0)};
    EXPECT_TRUE(std::isnan(loss_of(none, {}).item<double>()));
    EXPECT_EQ(loss_of(none, {.reduction = at::Reduction::Sum}).item<double>(), 0);
    EXPECT_EQ(loss_of(none, {.reduction = at::Reduction::None}).sizes(),
              (std::vector<int64_t>{3, 0}));
    loss_of(none, {.reduction = at::Reduction::Sum}).backward();
    EXPECT_EQ(head.weight.grad().abs().sum().item<double>(), 0);
    for (const auto reduction : kReductions) {
      const auto one = nn::linear_cross_entropy(head.input[0][0], head.weight, head.target[0][0],
                                                {.reduction = reduction});
      expect_equal(
          one.detach(),
          at::cross_entropy_loss(at::linear(head.input[0][0], head.weight), head.target[0][0])
              .detach(),
          "one row", kHeadTolerance);
    }
  });
}

TEST_P(LinearCrossEntropy, TakesStridedTensors) {
  run([] {
    const auto head = made_head(at::kDouble);
    const Head strided{head.input.transpose(0, 1), head.weight.t().contiguous().t(), head.bias,
                       head.target.t()};
    const auto loss = loss_of(strided, {.bias = head.bias, .chunk_rows = 4});
    const auto expected = formula(head, {.bias = head.bias});
    expect_equal(loss.detach(), expected.detach(), "loss", kHeadTolerance);
    const auto got = gradients_of(loss, head), wanted = gradients_of(expected, head);
    for (size_t i = 0; i < 3; ++i) expect_equal(got[i], wanted[i], "gradient", kHeadTolerance);
  });
}

TEST_P(LinearCrossEntropy, ComputesTheGradientsThatAreAskedFor) {
  run([] {
    for (const auto reduction : kReductions) {
      for (size_t asked = 0; asked < 3; ++asked) {
        const auto head = made_head(at::kDouble);
        for (size_t i = 0; i < 3; ++i) head.leaves()[i].set_requires_grad(i == asked);
        const HeadOptions options{.bias = head.bias, .reduction = reduction, .chunk_rows = 4};
        loss_of(head, options).sum().backward();
        const auto got = head.leaves()[asked].grad();
        for (size_t i = 0; i < 3; ++i) EXPECT_EQ(head.leaves()[i].grad().defined(), i == asked);
        head.leaves()[asked].mutable_grad() = at::Tensor();
        formula(head, options).sum().backward();
        expect_equal(got, head.leaves()[asked].grad(), "gradient", kHeadTolerance);
      }
    }
  });
}

TEST_P(LinearCrossEntropy, LeavesGradientsAsTheyAreInASecondBackward) {
  run([] {
    const auto head = made_head(at::kDouble);
    const auto loss = loss_of(head, {.chunk_rows = 4});
    const auto gradients = [&](double upstream) {
      return torch::autograd::grad({loss}, {head.input, head.weight},
                                   {at::full({}, upstream, loss.options())}, true);
    };
    const auto first = gradients(1), second = gradients(-3), third = gradients(1);
    for (size_t i = 0; i < 2; ++i) {
      expect_bitwise_equal(third[i], first[i]);
      expect_equal(second[i], -3 * first[i], "", kHeadTolerance);
    }
  });
}

TEST_P(LinearCrossEntropy, ComputesNoGradientsWithoutGradMode) {
  run([] {
    const auto head = made_head(at::kDouble);
    const auto expected = formula(head, {}).detach();
    {
      const at::NoGradGuard no_grad;
      const auto loss = loss_of(head, {.chunk_rows = 4});
      EXPECT_FALSE(loss.requires_grad());
      expect_equal(loss, expected, "no_grad", kHeadTolerance);
    }
    const c10::InferenceMode inference;
    expect_equal(loss_of(head, {.chunk_rows = 4}), expected, "inference", kHeadTolerance);
  });
}

TEST_P(LinearCrossEntropy, IsCheckpointed) {
  run([] {
    const auto head = made_head(at::kDouble);
    for (const auto reduction : kReductions) {
      const auto body = [&](const at::Tensor& input) {
        return nn::linear_cross_entropy(
            input.tanh(), head.weight, head.target,
            {.bias = head.bias, .reduction = reduction, .chunk_rows = 4});
      };
      const auto got = gradients_of(checkpoint_call(body, head.input), head);
      const auto wanted = gradients_of(body(head.input), head);
      for (size_t i = 0; i < 3; ++i) expect_bitwise_equal(got[i], wanted[i]);
    }
  });
}

/// What 16 bits come to against the same numbers in float64.
void expect_near_double(const Head& head, const at::Tensor& loss, double tolerance) {
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  const auto in_double = [](const at::Tensor& value) {
    return value.detach().to(at::kDouble).requires_grad_();
  };
  const Head exact{in_double(head.input), in_double(head.weight), in_double(head.bias),
                   head.target};
  const auto expected = formula(exact, {.bias = exact.bias});
  expect_equal(loss.detach().to(at::kDouble), expected.detach(), "loss",
               Tolerance{tolerance, tolerance});
  loss.backward();
  expected.backward();
  for (size_t i = 0; i < 3; ++i) {
    const auto leaf = head.leaves()[i];
    EXPECT_EQ(leaf.grad().scalar_type(), leaf.scalar_type());
    expect_equal(leaf.grad().to(at::kDouble), exact.leaves()[i].grad(), std::to_string(i),
                 Tolerance{4 * tolerance, tolerance});
  }
}

TEST_P(LinearCrossEntropy, TakesSixteenBits) {
  run([] {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      const auto head = made_head(dtype);
      expect_near_double(head, loss_of(head, {.bias = head.bias, .chunk_rows = 4}), 1e-2);
    }
  });
}

TEST_P(LinearCrossEntropy, ComputesInTheDtypeOfAutocast) {
  run([] {
    const auto head = made_head(at::kFloat);
    at::Tensor loss, other;
    {
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      loss = loss_of(head, {.bias = head.bias, .chunk_rows = 4});
      other = loss_of({head.input.to(at::kBFloat16), head.weight, head.bias, head.target},
                      {.bias = head.bias, .chunk_rows = 4});
    }
    expect_bitwise_equal(other.detach(), loss.detach(), "an input in 16 bits");
    EXPECT_NE(loss.item<float>(), loss_of(head, {.bias = head.bias}).item<float>());
    expect_near_double(head, loss, 1e-2);
  });
}

// One and 2^-9: in bf16 the sum of many would stay 1.
TEST_P(LinearCrossEntropy, SumsGradientsOfWeightsInFp32) {
  run([] {
    constexpr int64_t kRows = 512;
    const auto input = at::full({kRows, 1}, 1.0 / 512, at::TensorOptions(run_device()));
    input[0] = 1;
    const auto low = input.to(at::kBFloat16);
    const auto weight =
        at::zeros({2, 1}, low.options()).requires_grad_();  // softmax: a half for each class
    const auto target = at::zeros({kRows}, low.options().dtype(at::kLong));
    nn::linear_cross_entropy(low, weight, target,
                             {.reduction = at::Reduction::Sum, .chunk_rows = 1})
        .backward();
    const auto expected = 0.5 * low.to(at::kFloat).sum().item<double>();
    EXPECT_NEAR(weight.grad()[1].item<double>(), expected, expected / 256);
  });
}

// Gradients of the mean are far below fp16's smallest number until the loss is scaled.
TEST_P(LinearCrossEntropy, KeepsSmallGradientsInFp16ForTheLossScale) {
  run([] {
    constexpr int64_t kRows = 4096, kClasses = 1024;
    const auto input = drawn_on_device({kRows, 4}, 1).to(at::kHalf).requires_grad_();
    const auto weight = (0.1 * drawn_on_device({kClasses, 4}, 2)).to(at::kHalf).requires_grad_();
    const auto target = at::randint(kClasses, {kRows}, at::detail::createCPUGenerator(3), at::kLong)
                            .to(run_device());
    (nn::linear_cross_entropy(input, weight, target) * 65536).backward();
    const auto exact = input.detach().to(at::kDouble).requires_grad_();
    at::cross_entropy_loss(exact.matmul(weight.detach().to(at::kDouble).t()), target).backward();
    const auto wanted = exact.grad() * 65536;
    EXPECT_LT((input.grad().to(at::kDouble) - wanted).norm().item<double>(),
              0.01 * wanted.norm().item<double>());
  });
}

// Large enough for a GPU's kernel of a block; the last block is smaller.
TEST_P(LinearCrossEntropy, OfManyClassesIsAsTheFormula) {
  run([] {
    constexpr int64_t kRows = 1500, kClasses = 4000;
    for (const auto reduction : kReductions) {
      Head head{drawn_on_device({kRows, 16}, 1).requires_grad_(),
                drawn_on_device({kClasses, 16}, 2).requires_grad_(),
                drawn_on_device({kClasses}, 3).requires_grad_(),
                at::randint(kClasses, {kRows}, at::detail::createCPUGenerator(4), at::kLong)
                    .to(run_device())};
      head.target.narrow(0, 20, 100).fill_(-100);
      const HeadOptions options{.bias = head.bias, .reduction = reduction, .chunk_rows = 512};
      const auto loss = loss_of(head, options), expected = formula(head, options);
      EXPECT_TRUE(at::allclose(loss, expected, 1e-3, 1e-3)) << loss;
      const auto got = gradients_of(loss, head), wanted = gradients_of(expected, head);
      for (size_t i = 0; i < got.size(); ++i) {
        const auto scale = wanted[i].abs().max().item<double>();
        EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-2, 1e-3 * scale)) << i << " " << reduction;
      }
    }
  });
}

TEST_P(LinearCrossEntropy, RefusesToBeDifferentiatedTwice) {
  run([] {
    for (const auto reduction : kReductions) {
      const auto head = made_head(at::kDouble);
      const auto loss = loss_of(head, {.reduction = reduction}).sum();
      EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                    torch::autograd::grad({loss}, {head.input}, {}, true, /*create_graph=*/true);
                  }),
                  AllOf(HasSubstr("linear_cross_entropy: expected a backward without create_graph"),
                        HasSubstr("use cross_entropy of linear")));
    }
  });
}

/// The most memory of tensors that was in use at a time during `call`, beyond that before it.
template <class Call>
int64_t peak_of(const Call& call) {
  if (run_device().is_cpu()) {
    benchmarks::CountedMemory memory;
    memory.restart_peak();
    const auto before = memory.live();
    call();
    return static_cast<int64_t>(memory.peak() - before);
  }
  auto& allocator = dynamic_cast<c10::DeviceAllocator&>(*c10::GetAllocator(run_device().type()));
  const auto index = run_device().index();
  allocator.resetPeakStats(index);
  const auto before = allocator.getDeviceStats(index).allocated_bytes[0].current;
  call();
  return allocator.getDeviceStats(index).allocated_bytes[0].peak - before;
}

TEST_P(LinearCrossEntropy, NeedsAFractionOfTheMemoryOfTheLogits) {
  run([] {
    constexpr int64_t kRows = 2048, kClasses = 8192, kFeatures = 16;
    constexpr int64_t kLogits = kRows * kClasses * 4;  // bytes in fp32: 64 MiB
    for (const auto reduction : kReductions) {
      const auto input = drawn_on_device({kRows, kFeatures}, 1).requires_grad_();
      const auto weight = drawn_on_device({kClasses, kFeatures}, 2).requires_grad_();
      const auto target =
          at::randint(kClasses, {kRows}, at::detail::createCPUGenerator(3), at::kLong)
              .to(run_device());
      const auto step = [&] {
        nn::linear_cross_entropy(input, weight, target, {.reduction = reduction, .chunk_rows = 64})
            .sum()
            .backward();
      };
      step();  // makes gradients and whatever libraries keep
      EXPECT_LT(peak_of(step), kLogits / 8);
    }
  });
}

// By default an eighth of the rows at a time: two or three tensors of that size, of four or more of
// the size of all logits.
TEST_P(LinearCrossEntropy, TakesAnEighthOfTheRowsAtATime) {
  run([] {
    constexpr int64_t kRows = 16384, kClasses = 8192, kFeatures = 4;
    const auto input = drawn_on_device({kRows, kFeatures}, 1);
    const auto weight = drawn_on_device({kClasses, kFeatures}, 2);
    const auto target = at::zeros({kRows}, weight.options().dtype(at::kLong));
    const auto peak = peak_of([&] { nn::linear_cross_entropy(input, weight, target); });
    EXPECT_GT(peak, kRows / 8 * kClasses * 4);
    EXPECT_LT(peak, kRows / 4 * kClasses * 4);
  });
}

TEST(LinearCrossEntropyErrors, AreThoseOfCrossEntropyForTargetsThatAreNoClasses) {
  const auto input = at::zeros({3, 4}), weight = at::zeros({5, 4});
  for (const int64_t wrong : {5, -1}) {
    const auto target = at::tensor({0, int(wrong), 2}, at::kLong);
    const auto expected = message_of<c10::IndexError>(
        [&] { at::cross_entropy_loss(at::linear(input, weight), target); });
    EXPECT_EQ(message_of<c10::IndexError>([&] { nn::linear_cross_entropy(input, weight, target); }),
              "linear_cross_entropy: expected targets from 0 to 4, or ignore_index, got another: " +
                  expected);
    EXPECT_THAT(expected, HasSubstr("out of bounds"));
  }
}

TEST(LinearCrossEntropyErrors, NameWhatWasExpected) {
  const auto x = at::zeros({3, 4}), w = at::zeros({5, 4}), t = at::zeros({3}, at::kLong);
  const auto value = [](const auto& input, const auto& weight, const auto& target,
                        const HeadOptions& options = {}) {
    return message_of([&] { nn::linear_cross_entropy(input, weight, target, options); });
  };
  const auto type = [](const auto& input, const auto& weight, const auto& target) {
    return message_of<c10::TypeError>([&] { nn::linear_cross_entropy(input, weight, target); });
  };
  EXPECT_THAT(value(x, at::zeros({5, 3}), t),
              HasSubstr("linear_cross_entropy: expected an input of [..., features] and a weight "
                        "of [classes, features], got [3, 4] and [5, 3]"));
  EXPECT_THAT(value(x, w, t.narrow(0, 0, 2)),
              HasSubstr("expected a target for each row of the input, got sizes [2]"));
  EXPECT_THAT(value(x, w, t, {.bias = at::zeros({4})}), HasSubstr("expected a bias of [5]"));
  EXPECT_THAT(value(x, w, t, {.chunk_rows = 0}), HasSubstr("expected chunk_rows of at least 1"));
  EXPECT_THAT(type(x.to(at::kLong), w, t), HasSubstr("expected a floating point input"));
  EXPECT_THAT(type(x, w, x), HasSubstr("expected indices of classes (int64) as target"));
  EXPECT_THAT(type(x, w.to(at::kDouble), t), HasSubstr("expected input and weight of one dtype"));
}

}  // namespace
}  // namespace tessera::testing
