// Plain libtorch programs after `tessera adopt --write`: they train as before, and their modules
// can be hooked, replicated and checkpointed. Each stands in a namespace of its own.
#include <tessera/tessera.h>

#include "support/ranks.h"

#include <torch/torch.h>

#include <cstdio>

namespace mnist {
#include "mnist/mnist.cpp"
}  // namespace mnist

namespace dcgan {
#include "dcgan/dcgan.cpp"
}  // namespace dcgan

namespace resnet {
// clang-format off: what includes comes after what it includes
#include "resnet/block.cpp"
#include "resnet/resnet.cpp"
#include "resnet/main.cpp"
// clang-format on
}  // namespace resnet

namespace tessera::testing {
namespace {

TEST(AdoptedPrograms, MnistTrainsAndItsLayersAreHooked) {
  EXPECT_EQ(mnist::main(), 0);
  mnist::Net net;
  std::vector<std::string> calls;
  for (const auto& child : named_children(net)) {
    register_forward_hook(*child.second, [&calls, name = child.first](auto&, auto&, auto&) {
      calls.push_back(name);
    });
  }
  net.forward(torch::ones({2, 1, 28, 28}));
  EXPECT_EQ(calls, (std::vector<std::string>{"conv1", "conv2", "conv2_drop", "fc1", "fc2"}));
}

TEST(AdoptedPrograms, DcganTrainsAndItsModulesAreHooked) {
  EXPECT_EQ(dcgan::main(), 0);
  dcgan::DCGANGenerator generator(dcgan::kNoiseSize);
  auto discriminator = dcgan::make_discriminator();
  int calls = 0;
  register_forward_hook(generator, [&](auto&, auto&, auto& result) {
    ++calls;
    result.tensor() = torch::zeros({4, 1, 14, 14});  // what the discriminator gets to see
  });
  register_forward_pre_hook(discriminator, [&](auto&, auto& arguments) {
    ++calls;
    EXPECT_EQ(arguments.tensor(0).abs().sum().template item<float>(), 0);
  });
  register_forward_hook(*discriminator->ptr(2), [&](auto&, auto&, auto&) { ++calls; });
  discriminator->forward(generator->forward(torch::randn({4, dcgan::kNoiseSize, 1, 1})));
  EXPECT_EQ(calls, 3);
}

TEST(AdoptedPrograms, ResnetTrainsAndIsReplicatedAndCheckpointed) {
  EXPECT_EQ(resnet::main(), 0);
  run_threads(2, [] {
    resnet::ResNet net(std::vector<int64_t>{4, 8});
    checkpoint(get_submodule(net, "blocks.1"));  // refused for modules of TORCH_MODULE
    replicate(net);
    net(torch::full({2, 3, 8, 8}, 1.0 + rank())).sum().backward();
    const auto gradient = get_parameter(net, "stem.weight").grad();
    const auto largest = all_reduce(gradient, ReduceOp::MAX);
    EXPECT_TRUE(gradient.equal(largest));
    EXPECT_GT(gradient.abs().sum().item<float>(), 0);
  });
}

}  // namespace
}  // namespace tessera::testing
