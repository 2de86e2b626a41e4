#include "nn/sample_modules.h"
#include "support/message_of.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <deque>
#include <list>
#include <span>

namespace tessera::testing {
namespace {

/// A hook of any kind that appends to a string.
auto logger(std::string& log, const std::string& name) {
  return [&log, name](auto&&...) { log += name; };
}

TEST(NnHooks, RunInOrderOfRegistrationOrPrepended) {
  Double module;
  std::string log;
  register_forward_pre_hook(module, logger(log, "a"));
  register_forward_pre_hook(module, logger(log, "b"));
  register_forward_pre_hook(module, logger(log, "c"), {.prepend = true});
  register_forward_hook(module, logger(log, "1"));
  register_forward_hook(module, logger(log, "2"));
  register_forward_hook(module, logger(log, "3"), {.prepend = true});
  module(kOnes);
  EXPECT_EQ(log, "cab312");
}

TEST(NnHooks, SeeTheModuleItsArgumentsAndItsResult) {
  Double module;
  int calls = 0;
  register_forward_hook(module,
                        [&](torch::nn::Module& seen, nn::Arguments& arguments, nn::Result& result) {
                          ++calls;
                          EXPECT_EQ(&seen, module.get());
                          EXPECT_TRUE(arguments.tensor(0).is_same(kOnes));
                          expect_bitwise_equal(result.tensor(), kOnes * 2);
                          EXPECT_FALSE(result.has_failed());
                        });
  module(kOnes);
  EXPECT_EQ(calls, 1);
}

TEST(NnHooks, ReplaceTensorsInEveryContainer) {
  const auto zero = [](at::Tensor& tensor) { tensor = at::zeros({1}); };
  int visited = 0;
  const auto replace_in = [&](auto value) {
    visited = 0;
    nn::visit_tensors(value, [&](at::Tensor& tensor) {
      zero(tensor);
      ++visited;
    });
    return value;
  };
  const auto is_zero = [](const at::Tensor& tensor) { return tensor.numel() == 1; };
  EXPECT_TRUE(is_zero(replace_in(kOnes)));
  EXPECT_TRUE(is_zero(replace_in(std::vector{kOnes, kOnes})[1]));
  EXPECT_EQ(visited, 2);
  EXPECT_TRUE(is_zero(replace_in(std::deque{kOnes, kOnes})[1]));
  EXPECT_TRUE(is_zero(replace_in(std::list{kOnes, kOnes}).back()));
  EXPECT_EQ(visited, 2);
  std::vector<at::Tensor> shown = {kOnes, kOnes};
  replace_in(std::span<at::Tensor>(shown));
  EXPECT_TRUE(is_zero(shown[1])) << "a span that can be written through";
  EXPECT_TRUE(is_zero(std::get<1>(replace_in(std::tuple(1, kOnes, std::string("x"))))));
  EXPECT_TRUE(is_zero(replace_in(std::pair(kOnes, 2)).first));
  EXPECT_TRUE(is_zero(replace_in(std::array{kOnes, kOnes})[1]));
  EXPECT_TRUE(is_zero(*replace_in(std::optional(kOnes))));
  EXPECT_FALSE(replace_in(std::optional<at::Tensor>()).has_value());
  EXPECT_EQ(visited, 0);
  EXPECT_TRUE(is_zero(replace_in(std::map<int, at::Tensor>{{1, kOnes}}).at(1)));
  EXPECT_TRUE(is_zero(replace_in(std::unordered_map<int, at::Tensor>{{1, kOnes}}).at(1)));
  EXPECT_TRUE(is_zero(std::get<0>(replace_in(std::variant<at::Tensor, int>(kOnes)))));
  torch::OrderedDict<std::string, at::Tensor> ordered;
  ordered.insert("x", kOnes);
  EXPECT_TRUE(is_zero(replace_in(ordered)["x"]));
  using Nested = std::map<int, std::vector<std::tuple<at::Tensor>>>;
  EXPECT_TRUE(is_zero(std::get<0>(replace_in(Nested{{0, {std::tuple(kOnes)}}}).at(0)[0])));
  const auto batch = replace_in(Batch{kOnes, {kOnes, kOnes}, "note"});
  EXPECT_TRUE(is_zero(batch.x) && is_zero(batch.more[1]));
  EXPECT_EQ(visited, 3);
  EXPECT_EQ(batch.note, "note");
  EXPECT_EQ(replace_in(std::vector<bool>{true}).size(), 1U);
  const std::vector<at::Tensor> fixed = {kOnes};
  replace_in(at::TensorList(fixed));
  replace_in(std::span<const at::Tensor>(fixed));
  EXPECT_EQ(visited, 0) << "views that can't be written through are passed over";
  EXPECT_EQ(replace_in(3), 3);
}

TEST(NnHooks, ReplaceTensorsInIValuesWithoutTouchingTheOriginal) {
  const auto replace_in = [](c10::IValue value) {
    nn::visit_tensors(value, [](at::Tensor& tensor) { tensor = tensor + 1; });
    return value;
  };
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("x", kOnes);
  const c10::IValue list = std::vector<at::Tensor>{kOnes, kOnes};
  const c10::IValue values[] = {kOnes, list, c10::ivalue::Tuple::create({kOnes, int64_t(3)}), dict};
  expect_bitwise_equal(replace_in(values[0]).toTensor(), kOnes * 2);
  expect_bitwise_equal(replace_in(list).toTensorList().get(1), kOnes * 2);
  expect_bitwise_equal(list.toTensorList().get(1), kOnes, "the caller's list");
  expect_bitwise_equal(replace_in(values[2]).toTupleRef().elements()[0].toTensor(), kOnes * 2);
  EXPECT_EQ(replace_in(values[2]).toTupleRef().elements()[1].toInt(), 3);
  expect_bitwise_equal(replace_in(values[3]).toGenericDict().at("x").toTensor(), kOnes * 2);
  expect_bitwise_equal(dict.at("x"), kOnes, "the caller's dict");
  EXPECT_EQ(replace_in(7).toInt(), 7);
}

TEST(NnHooks, ReplaceTensorsInListsAndDictsOfC10WithoutTouchingTheOriginal) {
  const auto replace_in = [](auto value) {
    nn::visit_tensors(value, [](at::Tensor& tensor) { tensor = tensor + 1; });
    return value;
  };
  const c10::List<at::Tensor> list({kOnes, kOnes});
  expect_bitwise_equal(replace_in(list).get(1), kOnes * 2);
  expect_bitwise_equal(list.get(1), kOnes, "the caller's list");
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("x", kOnes);
  expect_bitwise_equal(replace_in(dict).at("x"), kOnes * 2);
  expect_bitwise_equal(dict.at("x"), kOnes, "the caller's dict");
}

TEST(NnHooks, ReplaceArgumentsAndResultsOfUserTypes) {
  BatchEcho echo;
  Two two;
  register_forward_pre_hook(echo, [](auto&, nn::Arguments& arguments) {
    arguments[0].get<Batch>().note = "replaced";
    arguments.for_each_tensor([](at::Tensor& tensor) { tensor = tensor * 5; });
  });
  const auto batch = echo(Batch{kOnes, {kOnes}, ""});
  EXPECT_EQ(batch.note, "replaced");
  expect_bitwise_equal(batch.more[0], kOnes * 5);
  register_forward_hook(two, [](auto&, auto&, nn::Result& result) {
    EXPECT_EQ(result.tensors().size(), 2U);
    result.for_each_tensor([](at::Tensor& tensor) { tensor = -tensor; });
    std::get<2>(result.get<decltype(Two()(kOnes))>()) = 8;
  });
  const auto [first, second, third] = two(kOnes);
  expect_bitwise_equal(first, -kOnes);
  expect_bitwise_equal(second.at("twice"), kOnes * -2);
  EXPECT_EQ(third, 8);
}

TEST(NnHooks, AlwaysCalledOnesRunWhenForwardThrows) {
  Failing module;
  std::string log;
  register_forward_hook(module, logger(log, "never"));
  register_forward_hook(module,
                        [&](auto&, nn::Arguments& arguments, nn::Result& result) {
                          log += "always";
                          EXPECT_TRUE(result.has_failed());
                          EXPECT_FALSE(result.has_value());
                          EXPECT_EQ(arguments.size(), 1U);
                        },
                        {.always_call = true});
  register_forward_hook(module, [](auto&, auto&, auto&) { throw std::runtime_error("second"); },
                        {.always_call = true});
  register_forward_hook(module, logger(log, "!"), {.always_call = true});
  EXPECT_EQ(message_of<c10::Error>([&] { module(kOnes); }), "forward failed");
  EXPECT_EQ(log, "always!");
}

TEST(NnHooks, AlwaysCalledOnesRunOnceWhenAHookThrows) {
  Double module;
  std::string log;
  register_forward_hook(module, logger(log, "a"), {.always_call = true});
  auto thrower =
      register_forward_hook(module, [](auto&, auto&, auto&) { throw std::runtime_error("hook"); });
  register_forward_hook(module, logger(log, "b"));
  register_forward_hook(module, logger(log, "c"), {.always_call = true});
  EXPECT_THROW(module(kOnes), std::runtime_error);
  EXPECT_EQ(log, "ac");
  thrower.remove();
  log.clear();
  register_forward_pre_hook(module, [](auto&, auto&) { throw std::runtime_error("before"); });
  EXPECT_THROW(module(kOnes), std::runtime_error);
  EXPECT_EQ(log, "ac");
}

TEST(NnHooks, RemovedOnesDoNotRun) {
  Double module;
  std::string log;
  auto first = register_forward_pre_hook(module, logger(log, "a"));
  auto second = register_forward_hook(module, logger(log, "b"));
  auto third = register_full_backward_hook(module, logger(log, "c"));
  auto fourth = register_full_backward_pre_hook(module, logger(log, "d"));
  auto copy = first;
  first.remove();
  copy.remove();
  second.remove();
  third.remove();
  fourth.remove();
  module(kOnes.clone().requires_grad_()).sum().backward();
  EXPECT_EQ(log, "");
  EXPECT_FALSE(module->tessera_hook_point().is_hooked()) << "the fast path is back";
}

TEST(NnHooks, AddedOrRemovedDuringACallCountFromTheNextOn) {
  Double module;
  std::string log;
  nn::HookHandle itself, later;
  itself = register_forward_pre_hook(module, [&](auto& seen, auto&) {
    log += "a";
    itself.remove();
    later.remove();
    register_forward_hook(seen, logger(log, "new"));
  });
  later = register_forward_pre_hook(module, logger(log, "b"));
  module(kOnes);
  EXPECT_EQ(log, "ab");
  log.clear();
  module(kOnes);
  EXPECT_EQ(log, "new");
}

TEST(NnHooks, HandlesOutliveTheModuleAndHooksDieWithIt) {
  auto held = std::make_shared<int>(1);
  nn::HookHandle handle, none;
  {
    Double module;
    handle = register_forward_hook(module, [held](auto&, auto&, auto&) {});
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
  handle.remove();
  handle.remove();
  none.remove();
}

struct CountdownImpl : torch::nn::Module {
  int forward(std::function<int(int)> again, int from) {
    return from == 0 ? 0 : 1 + again(from - 1);
  }
};
TESSERA_MODULE(Countdown);

TEST(NnHooks, AModuleThatCallsItself) {
  Countdown module;
  std::string log;
  register_forward_pre_hook(module, [&](auto&, nn::Arguments& arguments) {
    log += std::to_string(arguments[1].get<int>());
  });
  register_forward_hook(module, [&](auto&, nn::Arguments& arguments, nn::Result& result) {
    log += ")";
    EXPECT_EQ(result.get<int>(), arguments[1].get<int>());
  });
  std::function<int(int)> again = [&](int from) { return module(again, from); };
  EXPECT_EQ(again(3), 3);
  EXPECT_EQ(log, "3210))))");
}

TEST(NnHooks, StackModulesAreHookableToo) {
  nn::Hooked<DoubleImpl> module;
  std::string log;
  register_forward_hook(module, logger(log, "a"));
  module.forward(kOnes);
  EXPECT_EQ(log, "a");
}

}  // namespace
}  // namespace tessera::testing
