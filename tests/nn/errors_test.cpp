#include "nn/sample_modules.h"
#include "nn/sample_tree.h"
#include "support/message_of.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

struct PlainImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
TORCH_MODULE(Plain);

struct UncopyableImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
TESSERA_MODULE(Uncopyable);

TEST(NnErrors, ModulesThatCantBeHooked) {
  Plain module;
  const std::string expected =
      ": expected a module whose calls can be hooked, got tessera::testing::(anonymous "
      "namespace)::PlainImpl; declare it with TESSERA_MODULE(Net) instead of TORCH_MODULE and make "
      "it as Net net(...), not by std::make_shared<NetImpl>; of torch::nn's modules take "
      "tessera::nn's";
  const auto nothing = [](auto&&...) {};
  EXPECT_EQ(message_of([&] { register_forward_pre_hook(module, nothing); }),
            "register_forward_pre_hook" + expected);
  EXPECT_EQ(message_of([&] { register_forward_hook(*module, nothing); }),
            "register_forward_hook" + expected);
  EXPECT_EQ(message_of([&] { register_full_backward_hook(module.ptr(), nothing); }),
            "register_full_backward_hook" + expected);
  EXPECT_EQ(message_of([&] { register_full_backward_pre_hook(module, nothing); }),
            "register_full_backward_pre_hook" + expected);
  EXPECT_FALSE(is_hookable(module));
}

TEST(NnErrors, EmptyFunctionsAndModules) {
  Double module;
  EXPECT_EQ(message_of([&] { register_forward_hook(module, nn::ForwardHook()); }),
            "register_forward_hook: expected a function, got an empty one");
  EXPECT_EQ(message_of([&] { register_post_accumulate_grad_hook(at::ones({1}), nullptr); }),
            "register_post_accumulate_grad_hook: expected a function, got an empty one");
  Double none = nullptr;
  EXPECT_EQ(message_of([&] { is_hookable(none); }),
            "expected a module, got an empty holder or a null pointer; make the module first");
  EXPECT_EQ(message_of([&] { is_hookable(std::shared_ptr<torch::nn::Module>()); }),
            "expected a module, got an empty holder or a null pointer; make the module first");
}

TEST(NnErrors, ValuesAskedForAsSomethingElse) {
  Named module;
  std::string text;
  register_forward_pre_hook(module, [&](auto&, nn::Arguments& arguments) {
    text = message_of<c10::TypeError>([&] { arguments[2].get<int>(); });
    EXPECT_NE(message_of<c10::IndexError>([&] {
                arguments.tensor(3);
              }).find("hook: expected the index of one of the call's 3 arguments, got 3"),
              std::string::npos);
  });
  References nothing;
  register_forward_hook(nothing, [&](auto&, auto&, nn::Result& result) {
    EXPECT_EQ(message_of([&] { result.tensor(); }),
              "hook: expected a result, but the call returns nothing; ask has_value() first");
  });
  module(at::ones({1}), at::ones({1}), 1);
  EXPECT_EQ(text,
            "hook: expected the value 'scale' to be asked for as double, which it is, got int");
  auto out = at::ones({1});
  std::string written;
  nothing(out, std::make_unique<int>(1), &written);
}

TEST(NnErrors, GradientHooksOnTheWrongTensors) {
  const auto nothing = [](const at::Tensor&) {};
  const std::string expected =
      "register_post_accumulate_grad_hook: expected a leaf that requires grad, got ";
  EXPECT_EQ(message_of([&] { register_post_accumulate_grad_hook(at::Tensor(), nothing); }),
            expected + "an undefined tensor");
  EXPECT_EQ(message_of([&] { register_post_accumulate_grad_hook(at::ones({1}), nothing); }),
            expected + "a tensor that does not; set requires_grad first");
  const auto x = at::ones({1}).requires_grad_();
  EXPECT_EQ(message_of([&] { register_post_accumulate_grad_hook(x * 2, nothing); }),
            expected + "the result of an operator; take a parameter");
}

TEST(NnErrors, UnknownNames) {
  Branch branch(3, true);
  EXPECT_EQ(message_of([&] { get_parameter(branch, "seq.2.weight"); }),
            "get_parameter: expected the name of a parameter of tessera::testing::BranchImpl, got "
            "'seq.2.weight'; there are: scale, seq.0.weight, seq.0.bias, seq.1.weight, seq.1.bias");
  EXPECT_EQ(message_of([&] { get_buffer(branch, "scale"); }),
            "get_buffer: expected the name of a buffer of tessera::testing::BranchImpl, got "
            "'scale'; there are: count, scratch");
  EXPECT_EQ(message_of([&] { get_submodule(branch, "sequence"); }),
            "get_submodule: expected the name of a module in tessera::testing::BranchImpl, got "
            "'sequence'; there are: seq, seq.0, seq.1");
  nn::Hooked<DoubleImpl> alone;
  EXPECT_NE(
      message_of([&] { get_submodule(alone, ""); }).find("get_submodule: expected the module"),
      std::string::npos);
}

TEST(NnErrors, ModulesThatCantBeCloned) {
  const std::string advice = "; build a second one and copy the values with load_state_dict";
  const auto hookable = message_of<c10::NotImplementedError>([&] { clone_module(Uncopyable()); });
  EXPECT_EQ(hookable,
            "clone_module: expected a module that can be cloned, but tessera::testing::(anonymous "
            "namespace)::UncopyableImpl does not derive from torch::nn::Cloneable" +
                advice);
  const auto plain = message_of<c10::NotImplementedError>([&] { clone_module(Plain()); });
  EXPECT_TRUE(plain.starts_with("clone_module: expected a module that can be cloned, but "))
      << plain;
  EXPECT_TRUE(plain.ends_with(advice)) << plain;
}

}  // namespace
}  // namespace tessera::testing
