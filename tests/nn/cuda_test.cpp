// Modules, hooks and autocast on a GPU.
#include <tessera/autocast.h>
#include <tessera/nn.h>

#include "compose/on_device.h"
#include "support/tolerance.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

class NnOnDevices : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCuda, NnOnDevices, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

at::ScalarType dtype_of_product(c10::Device device) {
  return at::mm(torch::ones({2, 2}, device), torch::ones({2, 2}, device)).scalar_type();
}

TEST_P(NnOnDevices, AutocastIsOfItsDeviceAlone) {
  run([] {
    {
      const Autocast autocast(run_device().type());
      EXPECT_EQ(dtype_of_product(run_device()), at::kHalf);
      EXPECT_EQ(dtype_of_product(at::kCPU), at::kFloat);
      const Autocast low(run_device().type(), {.dtype = at::kBFloat16});
      EXPECT_EQ(dtype_of_product(run_device()), at::kBFloat16);
      const Autocast off(run_device().type(), {.enabled = false});
      EXPECT_EQ(dtype_of_product(run_device()), at::kFloat);
    }
    EXPECT_EQ(dtype_of_product(run_device()), at::kFloat);
  });
}

TEST_P(NnOnDevices, AutocastGivesGradientsInTheDtypeOfTheParameters) {
  run([] {
    auto net = on_device(nn::Linear(8, 4));
    at::Tensor loss;
    {
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      const auto y = net(drawn_on_device({3, 8}, 1));
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      loss = torch::log_softmax(y, 1).sum();
      EXPECT_EQ(loss.scalar_type(), at::kFloat) << "what needs fp32 gets it";
    }
    loss.backward();
    EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
  });
}

TEST_P(NnOnDevices, CastsAWeightAnewAfterAnUpdate) {
  run([] {
    auto weight = torch::ones({2, 2}, run_device()).requires_grad_();
    const auto product = [&] {
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      return at::mm(torch::ones({1, 2}, run_device()), weight).sum().item<float>();
    };
    EXPECT_EQ(product(), 4);
    {
      const at::NoGradGuard no_grad;
      weight.mul_(2);
    }
    EXPECT_EQ(product(), 8);
  });
}

TEST_P(NnOnDevices, HooksSeeTensorsOfTheDeviceOnBothWays) {
  run([] {
    auto net = on_device(nn::Sequential(nn::Linear(4, 5), nn::ReLU(), nn::Linear(5, 3)));
    std::vector<std::string> seen;
    auto first = nn::Linear(std::dynamic_pointer_cast<nn::Linear::ContainedType>(net->ptr(0)));
    register_forward_hook(first, [&](auto&, auto& arguments, auto&) {
      EXPECT_EQ(arguments.tensor(0).device(), run_device());
      seen.emplace_back("forward");
    });
    register_post_accumulate_grad_hook(first->weight, [&](const at::Tensor& parameter) {
      EXPECT_EQ(parameter.grad().device(), run_device());
      seen.emplace_back("gradient");
    });
    net->forward(drawn_on_device({2, 4}, 1)).sum().backward();
    EXPECT_EQ(seen, (std::vector<std::string>{"forward", "gradient"}));
  });
}

TEST_P(NnOnDevices, LinearComputesWhatTheCpuDoes) {
  run([] {
    for (const bool has_bias : {false, true}) {
      auto plain =
          seeded(3, [&] { return nn::Linear(torch::nn::LinearOptions(12, 7).bias(has_bias)); });
      auto moved = seeded(
          3, [&] { return on_device(nn::Linear(torch::nn::LinearOptions(12, 7).bias(has_bias))); });
      const auto x = at::randn({2, 5, 12}, at::detail::createCPUGenerator(1));
      const auto expected = plain(x);
      const auto y = moved(x.to(run_device()));
      expect_equal(y.detach().cpu(), expected.detach(), "output", Tolerance{1e-4, 1e-5});
      expected.square().sum().backward();
      y.square().sum().backward();
      expect_equal(moved->weight.grad().cpu(), plain->weight.grad(), "gradient",
                   Tolerance{1e-4, 1e-4});
    }
  });
}

// A gradient that was rounded to bf16 on its way is off by 2^-9.
TEST_P(NnOnDevices, GradientsOfLinearUnderAutocastAreNotRounded) {
  run([] {
    for (const bool has_bias : {false, true}) {
      auto net = seeded(3, [&] {
        return on_device(nn::Linear(torch::nn::LinearOptions(64, 16).bias(has_bias)));
      });
      const auto x = drawn_on_device({4, 8, 64}, 1).requires_grad_();
      const auto upstream = drawn_on_device({4, 8, 16}, 2).to(at::kBFloat16);
      at::Tensor y;
      {
        const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
        y = net(x);
      }
      y.backward(upstream);
      const auto low = [](const at::Tensor& value) {
        return value.detach().to(at::kBFloat16).to(at::kDouble).flatten(0, -2);
      };
      const auto rows = upstream.to(at::kDouble).flatten(0, 1);
      expect_equal(net->weight.grad().to(at::kDouble), rows.t().mm(low(x)), "weight",
                   Tolerance{1e-5, 1e-5});
      if (has_bias)
        expect_equal(net->bias.grad().to(at::kDouble), rows.sum(0), "bias", Tolerance{1e-5, 1e-5});
      expect_equal(x.grad().to(at::kDouble).flatten(0, 1), rows.mm(low(net->weight)), "input",
                   Tolerance{1e-2, 1e-2});
      EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    }
  });
}

TEST_P(NnOnDevices, LinearUnderAutocastIsDifferentiatedTwice) {
  run([] {
    auto net = seeded(3, [] { return on_device(nn::Linear(12, 5)); });
    const auto x = drawn_on_device({6, 12}, 1).requires_grad_();
    const auto penalty = [&](const auto& forward) {
      net->zero_grad();
      at::Tensor loss;
      {
        const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
        loss = forward().square().sum();
      }
      const auto gradient = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      gradient.square().sum().backward();
      return net->weight.grad().clone();
    };
    const auto expected = penalty([&] { return at::linear(x, net->weight, net->bias); });
    expect_equal(penalty([&] { return net(x); }), expected, "gradient of the penalty",
                 Tolerance{2e-2, 2e-2});
  });
}

TEST_P(NnOnDevices, FrozenLinearPassesGradientsOn) {
  run([] {
    auto net = on_device(nn::Sequential(nn::Linear(6, 5), nn::Linear(5, 3)));
    for (auto& parameter : net->ptr(1)->parameters()) parameter.set_requires_grad(false);
    {
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      net->forward(drawn_on_device({4, 6}, 1)).sum().backward();
    }
    EXPECT_TRUE(net->ptr(0)->parameters()[0].grad().defined());
    EXPECT_FALSE(net->ptr(1)->parameters()[0].grad().defined());
  });
}

TEST_P(NnOnDevices, ClonesStayOnTheDevice) {
  run([] {
    auto net = on_device(nn::Linear(3, 2));
    const auto copy = clone_module(net);
    EXPECT_EQ(copy->weight.device(), run_device());
    expect_bitwise_equal(copy->weight.detach(), net->weight.detach(), "weight");
  });
}

}  // namespace
}  // namespace tessera::testing
