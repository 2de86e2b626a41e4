#include "nn/sample_modules.h"
#include "support/message_of.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

namespace outer::inner {

struct SpacedImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor input) { return input + 1; }
};
TESSERA_MODULE(Spaced, "input");

}  // namespace outer::inner

namespace tessera::testing {
namespace {

/// Counts calls, and adds ten to every tensor that comes in and every one that goes out.
template <class M>
void add_tens(M& module, int& calls) {
  const auto ten = [](at::Tensor& tensor) { tensor = tensor + 10; };
  register_forward_pre_hook(module, [=](torch::nn::Module&, nn::Arguments& arguments) {
    arguments.for_each_tensor(ten);
  });
  register_forward_hook(module,
                        [=, &calls](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
                          result.for_each_tensor(ten);
                          ++calls;
                        });
}

TEST(NnCalls, EveryWayInRunsHooks) {
  Double module;
  int calls = 0;
  add_tens(module, calls);
  const auto expected = at::full({2, 2}, 32.0);
  expect_bitwise_equal(module(kOnes), expected, "m(x)");
  expect_bitwise_equal(module->forward(kOnes), expected, "m->forward(x)");
  expect_bitwise_equal((*module).forward(kOnes), expected, "(*m).forward(x)");
  expect_bitwise_equal(module.ptr()->forward(kOnes), expected, "pointer");
  torch::nn::AnyModule any(module);
  expect_bitwise_equal(any.forward(kOnes), expected, "AnyModule");
  expect_bitwise_equal(torch::nn::Sequential(module)->forward(kOnes), expected, "torch Sequential");
  expect_bitwise_equal(nn::Sequential(module)->forward(kOnes), expected, "Sequential");
  expect_bitwise_equal(any.get<Double>()->forward(kOnes), expected, "AnyModule::get");
  torch::nn::Module& plain = *module;
  expect_bitwise_equal(plain.as<Double>()->forward(kOnes), expected, "as");
  EXPECT_EQ(calls, 9);
  DoubleImpl& base = *module;
  expect_bitwise_equal(base.forward(kOnes), kOnes * 2, "a reference to the base class is unhooked");
  EXPECT_EQ(calls, 9);
}

TEST(NnCalls, WhatHooksReplaceIsNotWrittenIntoTheCallersVariables) {
  int calls = 0;
  auto x = kOnes.clone();
  const auto before = x;
  Double module;
  nn::Sequential sequential{Double(), Double()};
  Defaults defaults;
  Coder coder;
  add_tens(module, calls);
  add_tens(sequential, calls);
  add_tens(defaults, calls);
  add_tens(coder, calls);
  module(x);
  sequential->forward(x);
  expect_bitwise_equal(defaults(x), (kOnes + 10) * 3 + 1 + 10, "with defaults");
  coder->encode(x);
  expect_bitwise_equal(coder->fill(x, 5), kOnes + 10 + 5 + 10, "overloaded");
  EXPECT_TRUE(x.is_same(before));
  EXPECT_EQ(calls, 5);
}

TEST(NnCalls, SequentialIsHookedAsAWholeAndInParts) {
  nn::Sequential sequential({{"first", Double()}, {"second", Double()}});
  std::string order;
  const auto log = [&](const std::string& name) {
    return [&order, name](auto&...) { order += name; };
  };
  register_forward_pre_hook(sequential, log("("));
  register_forward_hook(sequential, log(")"));
  register_forward_hook(sequential[0], log("1"));
  register_forward_hook(get_submodule(sequential, "second"), log("2"));
  expect_bitwise_equal(sequential(kOnes), kOnes * 4);
  EXPECT_EQ(order, "(12)");
  nn::Sequential tuples{Two()};
  EXPECT_EQ(std::get<2>((tuples->forward<decltype(Two()(kOnes))>(kOnes))), 7);
}

TEST(NnCalls, DefaultArguments) {
  Defaults module;
  int calls = 0;
  register_forward_hook(module, [&](auto&, nn::Arguments& arguments, auto&) {
    ++calls;
    EXPECT_EQ(arguments[0].name(), std::string());
  });
  expect_bitwise_equal(module(kOnes), kOnes * 4);
  expect_bitwise_equal(module(kOnes, 5), kOnes * 6);
  expect_bitwise_equal(module(kOnes, 5.0, 2), kOnes * 7);
  expect_bitwise_equal(module->forward(kOnes, 5.0, 2), kOnes * 7);
  torch::nn::AnyModule any(module);
  expect_bitwise_equal(any.forward(kOnes), kOnes * 4, "AnyModule");
  expect_bitwise_equal(any.forward(kOnes, 5.0), kOnes * 6, "AnyModule");
  EXPECT_EQ(calls, 6);
}

TEST(NnCalls, MoveOnlyAndReferenceArguments) {
  MoveOnly module;
  References references;
  for (const bool hooked : {false, true}) {
    int seen = 0;
    if (hooked) {
      register_forward_pre_hook(module, [&](auto&, nn::Arguments& arguments) {
        seen = *arguments[0].get<std::unique_ptr<int>>();
      });
      register_forward_pre_hook(references, [](auto&, nn::Arguments& arguments) {
        arguments.tensor(0) = arguments.tensor(0) * 2;
        EXPECT_EQ(*arguments[1].get<std::unique_ptr<int>>(), 5);
      });
    }
    EXPECT_EQ(module(std::make_unique<int>(3), std::make_unique<int>(4)), 7);
    EXPECT_EQ(seen, hooked ? 3 : 0);
    auto out = kOnes;
    std::string text;
    references(out, std::make_unique<int>(5), &text);
    expect_bitwise_equal(out, kOnes * (hooked ? 7 : 6), "written through");
    EXPECT_EQ(text, "called");
  }
}

TEST(NnCalls, ConstAndNoexceptForward) {
  Const module;
  Quiet quiet;
  const Const& constant = module;
  int calls = 0;
  add_tens(module, calls);
  add_tens(quiet, calls);
  expect_bitwise_equal(module(kOnes), kOnes * 22);
  expect_bitwise_equal(constant->forward(kOnes), kOnes * 22);
  expect_bitwise_equal(quiet(kOnes), kOnes * 21);
  EXPECT_EQ(calls, 3);
}

TEST(NnCalls, NamesOfParameters) {
  Named module;
  register_forward_pre_hook(module, [](torch::nn::Module&, nn::Arguments& arguments) {
    ASSERT_EQ(arguments.size(), 3U);
    EXPECT_EQ(arguments.find("nothing"), nullptr);
    EXPECT_EQ(arguments.find("mask"), &arguments[1]);
    EXPECT_TRUE(arguments[1].is<std::optional<at::Tensor>>());
    arguments.find("scale")->get<double>() = 4;
    arguments.find("mask")->get<std::optional<at::Tensor>>() = at::full({2, 2}, 3.0);
  });
  expect_bitwise_equal(module(kOnes, std::nullopt, 1.0), kOnes * 12);
  outer::inner::Spaced spaced;
  register_forward_pre_hook(spaced, [](auto&, nn::Arguments& arguments) {
    arguments.find("input")->get<at::Tensor>() = at::zeros({1});
  });
  expect_bitwise_equal(spaced(kOnes), at::ones({1}));
  EXPECT_EQ(spaced->name(), "outer::inner::SpacedImpl");
}

TEST(NnCalls, ModuleDeclaredInAFunction) {
  struct LocalImpl : torch::nn::Module {
    at::Tensor forward(at::Tensor x) { return x + 1; }
  };
  TESSERA_MODULE(Local);
  Local module;
  int calls = 0;
  add_tens(module, calls);
  expect_bitwise_equal(module(kOnes), kOnes * 22);
  EXPECT_EQ(calls, 1);
}

TEST(NnCalls, OtherEntryPoints) {
  Coder coder(4);
  OneMethod one;
  expect_bitwise_equal(coder->encode(kOnes, 2), kOnes * 8, "unhooked");
  int calls = 0;
  add_tens(coder, calls);
  expect_bitwise_equal(coder->encode(kOnes), kOnes * 54);
  expect_bitwise_equal(coder->encode(kOnes, 2), kOnes * 98);
  const Coder& constant = coder;
  expect_bitwise_equal(constant->decode(kOnes * 2), kOnes * 13);
  auto out = kOnes;
  coder->add_to(out, 1);
  expect_bitwise_equal(out, kOnes * 12, "a reference is written through");
  EXPECT_EQ(calls, 4);
  coder(kOnes);
  EXPECT_EQ(calls, 5) << "what forward calls inside runs no hooks";
  register_forward_hook(one, [](auto&, auto&, nn::Result& result) { result.get<int>() *= 10; });
  EXPECT_EQ(one->more(1), 20);
  EXPECT_EQ(one(1), 10);
}

TEST(NnCalls, ReplayRunsTheCallAgainWithCopies) {
  Named module;
  std::vector<double> sums;
  std::vector<nn::Replay> replays;
  register_forward_pre_hook(module, [&](auto&, nn::Arguments& arguments) {
    sums.push_back(arguments.tensor(0).sum().item<double>());
    if (replays.empty()) replays.push_back(arguments.replay());
  });
  {
    auto x = kOnes * 3;
    module(x, kOnes, 2.0);
  }
  replays.front()();
  EXPECT_EQ(sums, (std::vector<double>{12, 12}));
  MoveOnly move_only;
  register_forward_pre_hook(move_only, [](auto&, nn::Arguments& arguments) { arguments.replay(); });
  EXPECT_NE(message_of<c10::NotImplementedError>([&] {
              move_only(std::make_unique<int>(3), std::make_unique<int>(4));
            }).find("replay: expected arguments that can be copied, but a call of "),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
