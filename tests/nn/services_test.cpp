#include "nn/sample_modules.h"
#include "nn/sample_tree.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::testing {
namespace {

using Names = std::vector<std::string>;

TEST(NnServices, ParametersBuffersAndModulesByName) {
  Tree tree;
  EXPECT_TRUE(get_parameter(tree, "u1.seq.1.weight")
                  .is_same(tree->u1->seq[1]->as<torch::nn::Linear>()->weight));
  EXPECT_TRUE(get_parameter(*tree, "u2.scale").is_same(tree->u2->scale));
  EXPECT_TRUE(get_buffer(tree.ptr(), "norm.running_mean").is_same(tree->norm->running_mean));
  EXPECT_EQ(get_submodule(tree, "u1.seq").get(), tree->u1->seq.get());
  EXPECT_EQ(get_submodule(tree, "").get(), tree.get());
  Names names;
  for (const auto& [name, child] : named_children(tree)) {
    EXPECT_EQ(child, get_submodule(tree, name));
    names.push_back(name);
  }
  EXPECT_EQ(names, (Names{"u2", "u1", "norm"}));
}

TEST(NnServices, ClonesHaveTheirOwnTensors) {
  Tree tree;
  int calls = 0;
  register_forward_hook(tree, [&](auto&, auto&, auto&) { ++calls; });
  register_forward_hook(tree->u1, [&](auto&, auto&, auto&) { ++calls; });
  tree->to(at::kDouble);
  tree->eval();
  auto clone = clone_module(tree);
  static_assert(std::is_same_v<decltype(clone), Tree>);
  const auto x = at::randn({4, 3}, at::kDouble);
  expect_bitwise_equal(clone(x), tree(x));
  EXPECT_EQ(calls, 2) << "hooks are not copied";
  ASSERT_EQ(clone->named_parameters().keys(), tree->named_parameters().keys());
  for (const auto& item : clone->named_parameters()) {
    EXPECT_FALSE(item.value().is_same(get_parameter(tree, item.key())));
    EXPECT_NE(item.value().data_ptr(), get_parameter(tree, item.key()).data_ptr());
  }
  EXPECT_TRUE(clone->u1->scale.is_same(get_parameter(clone, "u1.scale"))) << "members follow";
  for (const auto& module : clone->modules()) EXPECT_TRUE(is_hookable(module)) << module->name();
  EXPECT_FALSE(clone->is_training());
  EXPECT_FALSE(is_persistent(clone->u1->scratch));
  EXPECT_TRUE(is_persistent(clone->u1->count));
}

TEST(NnServices, ClonesOfWhateverIsGiven) {
  Double holder;
  EXPECT_TRUE(is_hookable(clone_module(holder.ptr())));
  EXPECT_TRUE(is_hookable(clone_module(*holder)));
  const std::shared_ptr<torch::nn::Module> module = holder.ptr();
  EXPECT_NE(clone_module(module), module);
  torch::nn::Linear plain(2, 2);
  expect_bitwise_equal(clone_module(plain)->weight, plain->weight);
  nn::Sequential named({{"up", nn::Linear(2, 2)}, {"act", nn::ReLU()}});
  EXPECT_EQ(clone_module(named)->named_children().keys(), (Names{"up", "act"}));
}

TEST(NnServices, SavesAndLoadsAsTorchs) {
  Tree tree, other;
  torch::nn::Linear plain(3, 2);
  nn::Linear hookable(3, 2);
  std::stringstream stream, second;
  torch::save(tree, stream);
  torch::load(other, stream);
  for (const auto& item : tree->named_parameters())
    expect_bitwise_equal(get_parameter(other, item.key()), item.value(), item.key());
  torch::save(plain, second);
  torch::load(hookable, second);
  expect_bitwise_equal(hookable->weight, plain->weight, "a file of the plain module");
}

TEST(NnServices, ToMovesMembersAlong) {
  Tree tree;
  const auto weight = get_parameter(tree, "u1.seq.0.weight");
  tree->to(at::kDouble);
  EXPECT_TRUE(get_parameter(tree, "u1.seq.0.weight").is_same(weight));
  EXPECT_EQ(tree->u1->scale.scalar_type(), at::kDouble);
  EXPECT_FALSE(is_persistent(tree->u1->scratch)) << "remembered through to()";
}

TEST(NnServices, PrintsTheUsersClass) {
  std::ostringstream text;
  text << Tree();
  EXPECT_EQ(text.str().find("Hooked"), std::string::npos) << text.str();
  EXPECT_TRUE(
      text.str().starts_with("tessera::testing::TreeImpl(\n"
                             "  (u2): tessera::testing::BranchImpl(\n"
                             "    (seq): torch::nn::Sequential(\n"
                             "      (0): torch::nn::Linear(in_features=3"))
      << text.str();
  EXPECT_EQ(Tree()->name(), "tessera::testing::TreeImpl");
}

TEST(NnServices, AsFindsHookableAndPlainClasses) {
  Tree tree;
  torch::nn::Module& module = *tree;
  EXPECT_EQ(module.as<Tree>(), tree.get());
  EXPECT_EQ(module.as<TreeImpl>(), tree.get());
  EXPECT_EQ(module.as<nn::Linear>(), nullptr);
  torch::nn::Module& linear = *get_submodule(tree, "u1.seq.0");
  EXPECT_NE(linear.as<nn::Linear>(), nullptr);
  EXPECT_NE(linear.as<torch::nn::Linear>(), nullptr);
  EXPECT_NE(linear.as<torch::nn::LinearImpl>(), nullptr);
}

TEST(NnServices, MembersOfTheUsersClassAreNotHidden) {
  struct WrapperImpl : torch::nn::Module {
    at::Tensor forward(at::Tensor x) { return x + module + hooks() + names; }
    int hooks() const { return 1; }
    bool is_hooked() const { return true; }
    int module = 2, names = 3, values = 4;
  };
  TESSERA_MODULE(Wrapper);
  Wrapper wrapper;
  register_forward_hook(wrapper, [](auto&, auto&, auto&) {});
  EXPECT_EQ(wrapper->module + wrapper->hooks() + wrapper->is_hooked() + wrapper->values, 8);
  expect_bitwise_equal(wrapper(at::zeros({1})), at::full({1}, 6.0));
}

}  // namespace
}  // namespace tessera::testing
