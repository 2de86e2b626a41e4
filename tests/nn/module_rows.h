#pragma once

#include <tessera/nn.h>

#include "support/tolerance.h"
#include "support/twins.h"

#include <gtest/gtest.h>

#include <sstream>

/// One row per class of torch::nn: built twice from the same seed, called plain and hooked.
namespace tessera::testing {

/// The same numbers whatever the default generator has drawn.
inline at::Tensor input(at::IntArrayRef sizes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  return at::randn(sizes, generator);
}
inline at::Tensor indices(at::IntArrayRef sizes, int64_t below) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(6);
  return at::randint(below, sizes, generator, at::kLong);
}

template <class R>
std::vector<at::Tensor> tensors_of(R result) {
  std::vector<at::Tensor> tensors;
  nn::visit_tensors(result, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

inline void expect_same(const std::vector<at::Tensor>& actual,
                        const std::vector<at::Tensor>& expected, const std::string& label) {
  ASSERT_EQ(actual.size(), expected.size()) << label;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << label;
    if (actual[i].defined()) expect_bitwise_equal(actual[i], expected[i], label);
  }
}

/// The gradients of the parameters, of the sum of what was returned.
inline std::vector<at::Tensor> gradients(torch::nn::Module& module,
                                         const std::vector<at::Tensor>& results) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
  at::Tensor sum;
  for (const auto& result : results) {
    if (!result.defined() || !result.requires_grad()) continue;
    sum = sum.defined() ? sum + result.sum() : result.sum();
  }
  if (sum.defined()) sum.backward();
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

template <class M>
std::string printed(const M& module) {
  std::ostringstream text;
  text << module;
  return text.str();
}

struct Counts {
  int before = 0, after = 0, arguments = 0, results = 0;
};

template <class M>
void count_calls(M& module, Counts& counts) {
  register_forward_pre_hook(module, [&counts](torch::nn::Module&, nn::Arguments& arguments) {
    ++counts.before;
    counts.arguments += static_cast<int>(arguments.tensors().size());
  });
  register_forward_hook(module, [&counts](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
    ++counts.after;
    counts.results += static_cast<int>(result.tensors().size());
  });
  register_full_backward_hook(module, [](auto&, auto&, const auto&) {});
}

template <class MakeTorch, class MakeTessera, class Call>
void compare(const std::string& name, const MakeTorch& make_torch, const MakeTessera& make_tessera,
             const Call& call) {
  SCOPED_TRACE(name);
  auto reference = seeded(3, make_torch);
  auto module = seeded(3, make_tessera);
  EXPECT_TRUE(is_hookable(module));
  EXPECT_EQ(printed(module), printed(reference));
  EXPECT_EQ(module->name(), reference->name());
  ASSERT_EQ(module->named_parameters().keys(), reference->named_parameters().keys());
  ASSERT_EQ(module->named_buffers().keys(), reference->named_buffers().keys());

  const auto run = [&](auto& which, const std::string& label) {
    const auto expected = tensors_of(seeded(4, [&] { return call(reference); }));
    const auto actual = tensors_of(seeded(4, [&] { return call(which); }));
    expect_same(actual, expected, name + ", " + label);
    expect_same(gradients(*which, actual), gradients(*reference, expected),
                name + ", gradients, " + label);
    return std::pair(expected.size(), actual.size());
  };
  EXPECT_GT(run(module, "plain").first, 0U);
  auto clone = clone_module(module);
  expect_same(clone->parameters(), module->parameters(), name + ", cloned parameters");
  expect_same(clone->buffers(), module->buffers(), name + ", cloned buffers");

  Counts counts;
  count_calls(module, counts);
  const auto results = run(module, "hooked").second;
  EXPECT_EQ(counts.before, 1);
  EXPECT_EQ(counts.after, 1);
  EXPECT_GT(counts.arguments, 0);
  EXPECT_EQ(counts.results, static_cast<int>(results));
}

/// Whether a clone computes the same: apart from the rest, since some modules have state.
template <class MakeTessera, class Call>
void compare_clone(const std::string& name, const MakeTessera& make_tessera, const Call& call) {
  auto module = seeded(3, make_tessera);
  Counts counts;
  count_calls(module, counts);
  auto clone = clone_module(module);
  EXPECT_TRUE(is_hookable(clone)) << name;
  const auto expected = tensors_of(seeded(4, [&] { return call(module); }));
  expect_same(tensors_of(seeded(4, [&] { return call(clone); })), expected, name + ", clone");
  EXPECT_EQ(counts.before, 1) << name << ": hooks are not cloned";
}

}  // namespace tessera::testing

/// Name, its constructor's arguments, the arguments of its call (or ->forward(…)).
#define MODULE_ROW(Name, Made, Called)                                                     \
  ::tessera::testing::compare(                                                             \
      #Name, [] { return torch::nn::Name Made; }, [] { return ::tessera::nn::Name Made; }, \
      [](auto& module) { return module Called; });                                         \
  ::tessera::testing::compare_clone(                                                       \
      #Name, [] { return ::tessera::nn::Name Made; }, [](auto& module) { return module Called; })
