#include "nn/composable.h"

#include "nn/sample_modules.h"
#include "nn/sample_tree.h"
#include "support/message_of.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

struct Kept : nn::ComposableState {
  explicit Kept(std::shared_ptr<int> token) : token(std::move(token)) {}
  std::shared_ptr<int> token;
};

void apply_function(torch::nn::Module& module, const char* function,
                    std::shared_ptr<int> token = std::make_shared<int>(0),
                    std::vector<std::string> excludes = {}) {
  nn::apply_composable(module, {.function = function, .excludes = std::move(excludes)},
                       [&] { return std::make_shared<Kept>(token); });
}

template <class M>
class NnComposable : public ::testing::Test {};
using Kinds = ::testing::Types<nn::Linear, torch::nn::Linear>;  // hookable, and not
TYPED_TEST_SUITE(NnComposable, Kinds);

TYPED_TEST(NnComposable, KeepsStatesByFunctionInOrder) {
  TypeParam module(2, 2), other(2, 2);
  EXPECT_EQ(nn::find_state(*module, "replicate"), nullptr);
  const auto token = std::make_shared<int>(0);
  apply_function(*module, "replicate", token);
  apply_function(*module, "checkpoint");
  EXPECT_EQ(nn::applied_functions(*module), (std::vector<std::string>{"replicate", "checkpoint"}));
  const auto state = std::dynamic_pointer_cast<Kept>(nn::find_state(*module, "replicate"));
  ASSERT_NE(state, nullptr);
  EXPECT_EQ(state->token, token);
  EXPECT_EQ(nn::find_state(*module, "fully_shard"), nullptr);
  EXPECT_TRUE(nn::applied_functions(*other).empty());
}

TYPED_TEST(NnComposable, StatesEndWithTheModule) {
  const auto token = std::make_shared<int>(0);
  {
    TypeParam module(2, 2);
    apply_function(*module, "replicate", token);
    EXPECT_EQ(token.use_count(), 2);
  }
  // A plain module's death is noticed at the next look at another one's states.
  EXPECT_TRUE(nn::applied_functions(*torch::nn::ReLU()).empty());
  EXPECT_EQ(token.use_count(), 1);
}

TYPED_TEST(NnComposable, IsAppliedOnce) {
  TypeParam module(2, 2);
  apply_function(*module, "replicate");
  EXPECT_EQ(
      message_of([&] { apply_function(*module, "replicate"); }),
      "replicate: torch::nn::LinearImpl already has replicate applied; a module takes it once");
}

TYPED_TEST(NnComposable, RefusesWhatDoesNotCompose) {
  TypeParam module(2, 2);
  apply_function(*module, "replicate");
  const auto text = message_of(
      [&] { apply_function(*module, "fully_shard", std::make_shared<int>(0), {"replicate"}); });
  EXPECT_EQ(text,
            "Cannot apply fully_shard to torch::nn::LinearImpl: replicate is applied to it; apply "
            "the two to different modules");
  EXPECT_EQ(nn::applied_functions(*module).size(), 1U);
}

TYPED_TEST(NnComposable, NamesMustNotChange) {
  TypeParam module(2, 2);
  const auto change = [&](const char* function, const std::function<void()>& what) {
    return message_of<c10::Error>([&] {
      nn::apply_composable(*module, {.function = function}, [&] {
        what();
        return std::make_shared<Kept>(nullptr);
      });
    });
  };
  EXPECT_EQ(change("a", [&] { module->register_parameter("extra", at::ones({1})); }),
            "a: expected to leave the names of parameters alone, but 'nothing' became 'extra'");
  EXPECT_EQ(change("b", [&] { module->register_buffer("more", at::ones({1})); }),
            "b: expected to leave the names of buffers alone, but 'nothing' became 'more'");
  EXPECT_EQ(change("c", [&] { module->register_module("child", Double()); }),
            "c: expected to leave the names of modules alone, but 'nothing' became 'child'");
  EXPECT_TRUE(nn::applied_functions(*module).empty());
}

TYPED_TEST(NnComposable, AFailureLeavesNoState) {
  TypeParam module(2, 2);
  EXPECT_THROW(nn::apply_composable(*module, {.function = "replicate"},
                                    []() -> std::shared_ptr<nn::ComposableState> {
                                      throw std::runtime_error("no");
                                    }),
               std::runtime_error);
  EXPECT_TRUE(nn::applied_functions(*module).empty());
  apply_function(*module, "replicate");
}

TEST(NnComposableErrors, PlainModulesMustBeShared) {
  torch::nn::LinearImpl module(2, 2);
  EXPECT_EQ(message_of([&] { apply_function(module, "replicate"); }),
            "replicate: expected a module that a std::shared_ptr or a holder owns, got a plain "
            "object of class torch::nn::LinearImpl; make it with std::make_shared, or use "
            "TESSERA_MODULE");
  nn::Hooked<torch::nn::LinearImpl> hookable(2, 2);
  apply_function(hookable, "replicate");
  EXPECT_EQ(nn::applied_functions(hookable).size(), 1U);
}

TEST(NnComposableErrors, ModulesWithStateAreNotCloned) {
  Tree tree;
  apply_function(*tree->u1->seq, "checkpoint");
  EXPECT_EQ(message_of<c10::Error>([&] { clone_module(tree); }),
            "clone_module: expected a module without composable state, but "
            "torch::nn::SequentialImpl has checkpoint applied; build a second module and copy the "
            "values with load_state_dict");
}

TEST(NnComposableErrors, ModulesWithStateDoNotCloneThemselves) {
  const auto refusal = [](const std::string& name) {
    return "clone_module: expected a module without composable state, but " + name +
           " has checkpoint applied; build a second module and copy the values with "
           "load_state_dict";
  };
  nn::Linear linear(2, 2);
  nn::Sequential sequential(nn::Linear(2, 2));
  apply_function(*linear, "checkpoint");
  apply_function(*sequential, "checkpoint");
  EXPECT_EQ(message_of<c10::Error>([&] { linear->clone(); }), refusal("torch::nn::LinearImpl"));
  EXPECT_EQ(message_of<c10::Error>([&] { sequential->clone(); }),
            refusal("torch::nn::SequentialImpl"));
  Tree tree;
  EXPECT_EQ(tree->clone()->parameters().size(), tree->parameters().size());
  apply_function(*tree->u2, "checkpoint");
  EXPECT_EQ(message_of<c10::Error>([&] { tree->clone(); }), refusal("tessera::testing::BranchImpl"))
      << "a part that is cloned with the whole";
}

}  // namespace
}  // namespace tessera::testing
