#include "nn/sample_tree.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>

namespace tessera::testing {
namespace {

TEST(NnPostAccumulateHooks, AnyNumberPerTensorInOrder) {
  const auto x = at::ones({2}).requires_grad_();
  std::string log;
  for (const char* name : {"a", "b", "c"}) {
    register_post_accumulate_grad_hook(x, [&log, name, x](const at::Tensor& tensor) {
      EXPECT_TRUE(tensor.is_same(x));
      EXPECT_TRUE(tensor.grad().defined());
      log += name;
    });
  }
  (x * 2).sum().backward();
  (x * 2).sum().backward();
  EXPECT_EQ(log, "abcabc");
}

TEST(NnPostAccumulateHooks, SeeTheAccumulatedGradientAndMayDropIt) {
  const auto x = at::ones({2}).requires_grad_();
  at::Tensor seen;
  register_post_accumulate_grad_hook(x, [&](const at::Tensor& tensor) {
    seen = tensor.grad().clone();
    tensor.mutable_grad() = at::Tensor();
  });
  (x * 2 + x * 3).sum().backward();
  expect_bitwise_equal(seen, at::full({2}, 5.0));
  EXPECT_FALSE(x.grad().defined());
}

TEST(NnPostAccumulateHooks, RemovedAloneOrWhileRunning) {
  const auto x = at::ones({2}).requires_grad_();
  std::string log;
  HookHandle second, itself;
  auto first = register_post_accumulate_grad_hook(x, [&](const at::Tensor&) {
    log += "a";
    second.remove();
  });
  second = register_post_accumulate_grad_hook(x, [&](const at::Tensor&) { log += "b"; });
  itself = register_post_accumulate_grad_hook(x, [&](const at::Tensor&) {
    log += "c";
    itself.remove();
  });
  x.sum().backward();
  EXPECT_EQ(log, "abc");
  x.sum().backward();
  EXPECT_EQ(log, "abca");
  first.remove();
  x.sum().backward();
  EXPECT_EQ(log, "abca");
}

TEST(NnPostAccumulateHooks, HandlesOutliveTheTensorAndHooksDieWithIt) {
  auto held = std::make_shared<int>(1);
  HookHandle handle;
  {
    const auto x = at::ones({2}).requires_grad_();
    handle = register_post_accumulate_grad_hook(x, [held](const at::Tensor&) {});
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
  handle.remove();
}

class ForeignHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit ForeignHook(std::string& log) : log_(log) {}
  void operator()(const at::Tensor&) override { log_ += "foreign"; }

 private:
  std::string& log_;
};

TEST(NnPostAccumulateHooks, AForeignHookThatWasThereBeforeStillRuns) {
  const auto x = at::ones({2}).requires_grad_();
  std::string log;
  torch::autograd::impl::set_post_acc_grad_hooks(x, std::make_unique<ForeignHook>(log));
  auto handle = register_post_accumulate_grad_hook(x, [&](const at::Tensor&) { log += "+ours"; });
  x.sum().backward();
  EXPECT_EQ(log, "foreign+ours");
  handle.remove();
  x.sum().backward();
  EXPECT_EQ(log, "foreign+oursforeign");
}

TEST(NnPostAccumulateHooks, RunForEveryParameterOfAModule) {
  Tree tree;
  std::set<std::string> names;
  for (const auto& item : tree->named_parameters()) {
    register_post_accumulate_grad_hook(
        item.value(), [&names, name = item.key()](const at::Tensor&) { names.insert(name); });
  }
  tree(at::randn({4, 3})).square().sum().backward();
  EXPECT_EQ(names.size(), tree->named_parameters().size());
}

}  // namespace
}  // namespace tessera::testing
