#include <tessera/optim.h>

#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <sstream>

namespace tessera::optim {
namespace {

using Params = std::vector<at::Tensor>;
constexpr auto kRecorder = c10::DispatchKey::PrivateUse2;

/// Every call with its arguments that are no tensors.
std::vector<std::string>& calls() {
  static std::vector<std::string> made;
  return made;
}

/// Puts the recorder's key before this thread's operators, or takes it away.
class RecorderScope {
 public:
  explicit RecorderScope(bool on) {
    auto keys = before_;
    const uint64_t bits = c10::DispatchKeySet(kRecorder).raw_repr();
    const uint64_t included = keys.included_.raw_repr();
    keys.included_ =
        c10::DispatchKeySet(c10::DispatchKeySet::RAW, on ? included | bits : included & ~bits);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  ~RecorderScope() { c10::impl::_force_tls_local_dispatch_key_set(before_); }
  RecorderScope(const RecorderScope&) = delete;
  RecorderScope& operator=(const RecorderScope&) = delete;

 private:
  c10::impl::LocalDispatchKeySet before_ = c10::impl::tls_local_dispatch_key_set();
};

void record(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const RecorderScope off(false);
  std::ostringstream call;
  call << op.schema().name();
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const c10::IValue& argument = (*stack)[i];
    if (!argument.isTensor() && !argument.isTensorList()) call << ' ' << argument;
  }
  calls().push_back(call.str());
  op.callBoxed(stack);
}

template <class Kind, class Options>
void expect_recordable(const Options& options, const std::string& label) {
  SCOPED_TRACE(label);
  at::manual_seed(4);
  const Params eager = {at::randn({6, 5}).set_requires_grad(true),
                        at::randn({33}).set_requires_grad(true)};
  Params recorded;
  for (const at::Tensor& param : eager)
    recorded.push_back(param.detach().clone().set_requires_grad(true));
  Kind reference(eager, options);
  Kind optimizer(recorded, options);
  std::vector<std::string> previous;
  for (int step = 0; step < 20; ++step) {
    for (size_t i = 0; i < eager.size(); ++i) {
      eager[i].mutable_grad() = at::randn(eager[i].sizes());
      recorded[i].mutable_grad() = eager[i].grad().clone();
    }
    reference.step();
    calls().clear();
    {
      const RecorderScope on(true);
      optimizer.step();
    }
    ASSERT_FALSE(calls().empty());
    if (step > 1) {  // the first makes the state
      EXPECT_EQ(calls(), previous) << "at step " << step;
    }
    previous = calls();
    for (size_t i = 0; i < eager.size(); ++i)
      ASSERT_TRUE(testing::tensors_bitwise_equal(recorded[i].detach(), eager[i].detach())) << step;
  }
}

TEST(OptimRecorded, StepsAreTheSameCallsWithTheSameNumbersAndBits) {
  torch::Library fallback(torch::Library::IMPL, "_", kRecorder, __FILE__, __LINE__);
  fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
  torch::Library autograd(torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse2,
                          __FILE__, __LINE__);
  autograd.fallback(torch::CppFunction::makeFallthrough());
  for (const std::optional<bool> foreach : {std::optional<bool>(), {true}}) {
    const std::string label = foreach ? "foreach" : "default";
    expect_recordable<SGD>(
        SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .foreach = foreach}, label);
    expect_recordable<Adam>(AdamOptions{.lr = 0.1, .weight_decay = 0.1, .foreach = foreach}, label);
    expect_recordable<AdamW>(AdamWOptions{.lr = 0.1, .amsgrad = true, .foreach = foreach}, label);
  }
  expect_recordable<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .fused = true}, "fused");
  expect_recordable<AdamW>(AdamWOptions{.lr = 0.1, .fused = true}, "fused");
}

}  // namespace
}  // namespace tessera::optim
