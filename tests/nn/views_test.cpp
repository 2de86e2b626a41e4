// Arguments that show tensors of the caller's: hooks replace what forward sees, not what they show.
#include "nn/sample_modules.h"
#include "support/message_of.h"
#include "support/tolerance.h"

#include <ATen/core/IListRef.h>
#include <gtest/gtest.h>

#include <deque>
#include <list>
#include <span>

namespace tessera::testing {
namespace {

const at::Tensor kPair = at::ones({2});
using TensorVector = std::vector<at::Tensor>;

/// Takes its tensors as a T and adds them up.
template <class T>
struct AddUpImpl : torch::nn::Module {
  at::Tensor forward(T tensors) {
    auto sum = at::zeros({2});
    for (const at::Tensor& tensor : tensors) sum = sum + tensor;
    return sum;
  }
};

using ListAdderImpl = AddUpImpl<at::TensorList>;
TESSERA_MODULE(ListAdder, "tensors");
using ConstListAdderImpl = AddUpImpl<const at::TensorList&>;
TESSERA_MODULE(ConstListAdder);
using MovedListAdderImpl = AddUpImpl<at::TensorList&&>;
TESSERA_MODULE(MovedListAdder);
using RefAdderImpl = AddUpImpl<at::ITensorListRef>;
TESSERA_MODULE(RefAdder);
using SpanAdderImpl = AddUpImpl<std::span<const at::Tensor>>;
TESSERA_MODULE(SpanAdder);
using WritableSpanAdderImpl = AddUpImpl<std::span<at::Tensor>>;
TESSERA_MODULE(WritableSpanAdder);
using DequeAdderImpl = AddUpImpl<std::deque<at::Tensor>>;
TESSERA_MODULE(DequeAdder);
using LinkedAdderImpl = AddUpImpl<const std::list<at::Tensor>&>;
TESSERA_MODULE(LinkedAdder);

/// Optional ones, and one by another entry point.
struct ManyViewsImpl : torch::nn::Module {
  at::Tensor forward(std::optional<at::TensorList> some,
                     at::ArrayRef<std::optional<at::Tensor>> gaps) {
    auto sum = at::zeros({2});
    if (some) {
      for (const auto& tensor : *some) sum = sum + tensor;
    }
    for (const auto& gap : gaps) sum = gap ? sum + *gap : sum;
    return sum;
  }
  at::Tensor last(at::TensorList tensors) { return tensors.back() * 1; }
};
TESSERA_MODULE(ManyViews);
TESSERA_MODULE_METHOD(ManyViews, last);

struct Redirected {
  TensorVector given = {kPair, kPair * 2};
  std::vector<nn::Replay> replays = {};
  int backwards = 0;
};

/// Every way in which a hook meets the tensors of a call `call(module, tensors)`.
template <class M, class Call>
void expect_replaced(M module, const Call& call, Redirected state = {}) {
  register_forward_pre_hook(module, [&](auto&, nn::Arguments& arguments) {
    EXPECT_EQ(arguments.tensors().size(), 2U);
    arguments.for_each_tensor([](at::Tensor& tensor) { tensor = tensor * 10; });
    if (state.replays.empty()) state.replays.push_back(arguments.replay());
  });
  std::vector<at::Tensor> results;
  register_forward_hook(module, [&](auto&, auto&, nn::Result& result) {
    results.push_back(result.tensor().detach());
  });
  register_full_backward_hook(module, [&](auto&, TensorVector& grad_inputs, const auto&) {
    ++state.backwards;
    EXPECT_EQ(grad_inputs.size(), 2U);
  });
  state.given[1].requires_grad_();
  call(module, state.given).sum().backward();
  EXPECT_EQ(state.backwards, 1);
  expect_bitwise_equal(results.at(0), kPair * 30);
  expect_bitwise_equal(state.given[1].grad(), kPair * 10);
  state.given.clear();  // a replay has copies of its own
  state.replays.front()();
  expect_bitwise_equal(results.at(1), kPair * 300, "the hook sees the replay too");
}

TEST(NnViews, HooksReplaceWhatForwardSees) {
  const auto given_whole = [](auto& module, TensorVector& tensors) {
    const auto before = tensors;
    auto result = module(tensors);
    for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(tensors[i].is_same(before[i]));
    return result;
  };
  expect_replaced(ListAdder(), given_whole);
  expect_replaced(ConstListAdder(), given_whole);
  expect_replaced(MovedListAdder(), given_whole);
  expect_replaced(RefAdder(), given_whole);
  expect_replaced(SpanAdder(), given_whole);
  expect_replaced(ManyViews(), [](auto& module, TensorVector& tensors) {
    const std::optional<at::Tensor> gaps[] = {std::nullopt, tensors[1]};
    return module(at::TensorList(tensors.data(), 1), gaps);
  });
}

TEST(NnViews, ListsOfOtherKindsAreReplacedToo) {
  expect_replaced(DequeAdder(), [](auto& module, TensorVector& tensors) {
    return module(std::deque<at::Tensor>(tensors.begin(), tensors.end()));
  });
  expect_replaced(LinkedAdder(), [](auto& module, TensorVector& tensors) {
    return module(std::list<at::Tensor>(tensors.begin(), tensors.end()));
  });
}

TEST(NnViews, AWritableSpanIsWrittenThrough) {
  WritableSpanAdder module;
  register_forward_pre_hook(module, [](auto&, nn::Arguments& arguments) {
    arguments.for_each_tensor([](at::Tensor& tensor) { tensor = tensor * 10; });
  });
  TensorVector tensors = {kPair, kPair};
  expect_bitwise_equal(module(tensors), kPair * 20);
  expect_bitwise_equal(tensors[0], kPair * 10, "as forward could have done");
}

TEST(NnViews, AreSeenAsVectorsByNameAndInEveryEntryPoint) {
  ListAdder module;
  register_forward_pre_hook(module, [](auto&, nn::Arguments& arguments) {
    arguments.find("tensors")->get<TensorVector>().push_back(kPair * 5);
  });
  const TensorVector one = {kPair};
  expect_bitwise_equal(module(one), kPair * 6, "a vector may grow");
  expect_bitwise_equal(module->forward(one), kPair * 6);
  expect_bitwise_equal(torch::nn::AnyModule(module).forward(at::TensorList(one)), kPair * 6);
  register_forward_pre_hook(
      module, [](auto&, nn::Arguments& arguments) { arguments[0].get<at::TensorList>(); });
  EXPECT_NE(message_of<c10::TypeError>([&] { module(one); }).find("std::vector<at::Tensor"),
            std::string::npos);

  ManyViews views;
  nn::Sequential sequential{ListAdder()};
  const auto negate = [](auto&, nn::Arguments& arguments) {
    arguments.for_each_tensor([](at::Tensor& tensor) { tensor = -tensor; });
  };
  register_forward_pre_hook(views, negate);
  register_forward_pre_hook(sequential, negate);
  expect_bitwise_equal(views->last(one), -kPair);
  at::TensorList list(one);
  expect_bitwise_equal(sequential->forward(list), -kPair);
  expect_bitwise_equal(sequential->forward(at::TensorList(one)), -kPair);
  EXPECT_EQ(list.data(), one.data()) << "the caller's view shows what it did";
}

}  // namespace
}  // namespace tessera::testing
