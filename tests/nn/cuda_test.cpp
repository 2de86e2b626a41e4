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
