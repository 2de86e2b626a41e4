// Plain tensors that require grad beside distributed ones.
#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(PlainLossErrors, NumbersThatRequireGradBesideWholeTensors) {
  const FakeWorld world(0, 4);
  const auto mesh = init_device_mesh(torch::kCPU, {4});
  const auto rows = DTensor::from_local(numbered({2, 3}), mesh, {Shard(0)});
  const auto scale = torch::tensor(2.0).requires_grad_();
  EXPECT_THAT(message_of<c10::Error>([&] { rows* scale; }),
              AllOf(HasSubstr("aten::mul: argument 'other' is a plain tensor that requires grad"),
                    HasSubstr("DTensor::from_local(tensor, mesh)"), HasSubstr("full_tensor()")));
  const torch::NoGradGuard no_grad;
  EXPECT_EQ((rows * scale).sizes(), rows.sizes()) << "a number, without a gradient";
}

}  // namespace
}  // namespace tessera::testing
