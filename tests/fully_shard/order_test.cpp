// Units are called in one order, by all ranks and in every step.
#include "fully_shard/sharded_models.h"
#include "parallel/warnings.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct CrossedImpl : torch::nn::Module {
  CrossedImpl()
      : left(register_module("left", nn::Linear(5, 5))),
        right(register_module("right", nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x, const std::string& order) {
    auto y = x;
    for (const char which : order) y = which == 'l' ? left(y) : right(y);
    return y;
  }
  nn::Linear left, right;
};
TESSERA_MODULE(Crossed);

Crossed make_crossed() {
  auto net = seeded(1, [] { return Crossed(); });
  fully_shard(net->left);
  fully_shard(net->right);
  fully_shard(net);
  return net;
}

class OrderOn : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, OrderOn, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

TEST_P(OrderOn, AnotherOrderThanTheFirstIsAWarningOnce) {
  run([] {
    auto net = make_crossed();
    const auto x = torch::ones({2, 5});
    CaughtWarnings warnings;
    for (int step = 0; step < 2; ++step) net(x, "lr").sum().backward();
    EXPECT_THAT(warnings.texts, ::testing::IsEmpty());
    for (int step = 0; step < 2; ++step) net(x, "rl").sum().backward();
    ASSERT_EQ(warnings.texts.size(), 1);
    EXPECT_THAT(warnings.texts[0], AllOf(HasSubstr(c10::str("rank ", rank())),
                                         HasSubstr("called 'right' (torch::nn::LinearImpl)"),
                                         HasSubstr("called 'left' (torch::nn::LinearImpl)")));
  });
}

TEST_P(OrderOn, MoreOrFewerUnitsThanInTheFirst) {
  run([] {
    const auto x = torch::ones({2, 5});
    for (const bool has_more : {false, true}) {
      auto net = make_crossed();
      CaughtWarnings warnings;
      net(x, "lr").sum().backward();
      net(x, has_more ? "lrl" : "l").sum().backward();
      ASSERT_EQ(warnings.texts.size(), 1);
      EXPECT_THAT(warnings.texts[0],
                  has_more ? AllOf(HasSubstr("called 'left' (torch::nn::LinearImpl)"),
                                   HasSubstr("had ended"))
                           : AllOf(HasSubstr("ended its forward"),
                                   HasSubstr("called 'right' (torch::nn::LinearImpl)")));
    }
  });
}

TEST_P(OrderOn, RanksThatDifferInTheFirstForwardAreAnError) {
  run([] {
    auto net = make_crossed();
    const auto x = torch::ones({2, 5});
    const auto* mine = rank() == 0 ? "lr" : "rl";
    EXPECT_THAT(message_of<c10::Error>([&] { net(x, mine); }),
                AllOf(HasSubstr("expected all ranks to call units in the same order"),
                      HasSubstr(c10::str("rank ", 1 - rank(), " of the group calls ",
                                         rank() == 0 ? "'right' (torch::nn::LinearImpl)"
                                                     : "'left' (torch::nn::LinearImpl)"))));
    EXPECT_TRUE(is_dtensor(net->left->weight));
    net(x, "lr").sum().backward();
    EXPECT_TRUE(is_dtensor(net->left->weight.grad())) << "the model is still usable";
  });
}

}  // namespace
}  // namespace tessera::testing
