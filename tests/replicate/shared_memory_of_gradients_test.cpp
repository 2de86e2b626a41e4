// Gradients whose memory is that of a gradient on its way to somebody else.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "support/ranks.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

struct ShiftedImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 20000;  // too large to be copied into a bucket
  ShiftedImpl() : shift(register_parameter("shift", torch::zeros({kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) { return x + shift.unsqueeze(0); }
  at::Tensor shift;
};
TESSERA_MODULE(Shifted);

TEST(ReplicateOnThreads, GradientsOnTheirWayToInputsStayThisRanksOwn) {
  run_threads(2, [] {
    Shifted net;
    replicate(net);
    const auto x = torch::zeros({1, ShiftedImpl::kWidth}, torch::requires_grad());
    const auto scale = static_cast<double>(rank() + 1);
    (net(x * 1) * scale).sum().backward();
    expect_equal(x.grad(), torch::full_like(x, scale), "input");
    expect_equal(net->shift.grad(), torch::full({ShiftedImpl::kWidth}, 1.5), "parameter");
  });
}

}  // namespace
}  // namespace tessera::testing
