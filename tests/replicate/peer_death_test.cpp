#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

TEST(ReplicateDeath, OfARankInBackwardIsAnErrorOnTheOthers) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  run_processes(3,
                [] {
                  Wide net;
                  replicate(net);
                  const auto step = [&] { net(torch::randn({2, 7})).sum().backward(); };
                  step();
                  if (rank() == 1) {
                    register_post_accumulate_grad_hook(net->mid->weight,
                                                       [](const at::Tensor&) { raise(SIGKILL); });
                  }
                  EXPECT_THAT(message_of<c10::DistBackendError>(step),
                              AllOf(HasSubstr("rank 1"), HasSubstr("died")));
                },
                {.may_die = {1}});
}

}  // namespace
}  // namespace tessera::testing
