// How modules of torch::nn start that are built without memory.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/models.h"
#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

struct AttendingImpl : torch::nn::Module {
  AttendingImpl()
      : attention(register_module(
            "attention", nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(6, 2)))),
        rectifier(register_module(
            "rectifier", nn::PReLU(torch::nn::PReLUOptions().num_parameters(6).init(0.3)))) {}
  at::Tensor forward(const at::Tensor& x) { return rectifier(std::get<0>(attention(x, x, x))); }
  nn::MultiheadAttention attention;
  nn::PReLU rectifier;
};
TESSERA_MODULE(Attending);

TEST(MetaStart, AttentionAndRectifiersStartAsTheyDoWithMemory) {
  run_processes(2, [] {
    auto expected = seeded(5, [] { return Attending(); });
    auto net = [] {
      const MetaInit no_memory;
      return Attending();
    }();
    {
      const SeedScope scope(5);
      fully_shard(net);
    }
    for (const auto& item : expected->named_parameters())
      expect_equal(whole(net->named_parameters()[item.key()].detach()), item.value().detach(),
                   item.key());
    net(torch::randn({4, 6, 6})).sum().backward();
    EXPECT_TRUE(net->rectifier->weight.grad().defined());
  });
}

}  // namespace
}  // namespace tessera::testing
