// Parameters that are frozen at first and trained later.
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

void step(Net& net, const at::Tensor& x) {
  net->zero_grad();
  net(x).square().mean().backward();
}

TEST(ReplicateThawOnThreads, AveragesWhatIsTrainedLater) {
  run_threads(2, [] {
    auto [reference, net] = twins<Net>(4);
    const auto x = seeded(5, [] { return torch::randn({4, 2}); });
    net->fc2->weight.set_requires_grad(false);
    replicate(net);
    step(net, x.chunk(2)[rank()]);
    EXPECT_EQ(replicate_state(net)->param_names().size(), 5U);
    for (int batch = 0; batch < 3; ++batch) {
      net->fc2->weight.set_requires_grad(true);
      step(net, x.chunk(2)[rank()]);
      step(reference, x);
      EXPECT_EQ(replicate_state(net)->param_names().size(), 6U);
      const auto expected = reference->named_parameters();
      for (const auto& item : net->named_parameters())
        expect_equal(item.value().grad(), expected[item.key()].grad(), item.key(),
                     Tolerance{.rtol = 1e-4, .atol = 1e-6});
    }
  });
}

}  // namespace
}  // namespace tessera::testing
