// Data parallel training of models whose parts are computed twice.
#include <tessera/checkpoint.h>
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

struct PartImpl : torch::nn::Module {
  PartImpl()
      : up(register_module("up", nn::Linear(8, 150))),
        down(register_module("down", nn::Linear(150, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return x + torch::dropout(down(up(x).tanh()), 0.2, is_training());
  }
  nn::Linear up, down;
  int calls = 0;
};
TESSERA_MODULE(Part);

struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    for (int i = 0; i < 3; ++i)
      parts.push_back(register_module(std::string(1, 'p') + std::to_string(i), Part()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& part : parts) x = part(x);
    return x;
  }
  std::vector<Part> parts;
};
TESSERA_MODULE(Parts);

using Recipe = std::function<void(Parts&, ReplicateOptions)>;

void checkpoint_parts(Parts& net) {
  for (auto& part : net->parts) checkpoint(part);
}

const std::pair<const char*, Recipe> kRecipes[] = {
    {"PartsThenWhole",
     [](Parts& net, ReplicateOptions options) {
       checkpoint_parts(net);
       replicate(net, options);
     }},
    {"WholeThenParts",
     [](Parts& net, ReplicateOptions options) {
       replicate(net, options);
       checkpoint_parts(net);
     }},
    {"BothOnTheWhole",
     [](Parts& net, ReplicateOptions options) {
       checkpoint(net);
       replicate(net, options);
     }},
    {"BothOnTheWholeReplicateFirst",
     [](Parts& net, ReplicateOptions options) {
       replicate(net, options);
       checkpoint(net);
     }},
    {"BothOnEveryPart",
     [](Parts& net, ReplicateOptions options) {
       for (auto& part : net->parts) replicate(checkpoint(part), options);
     }},
    {"NestedCheckpoints",
     [](Parts& net, ReplicateOptions options) {
       checkpoint_parts(net);
       checkpoint(net);
       replicate(net, options);
     }},
};

class ReplicateAndCheckpoint : public ::testing::TestWithParam<std::pair<const char*, Recipe>> {};
INSTANTIATE_TEST_SUITE_P(Recipes, ReplicateAndCheckpoint, ::testing::ValuesIn(kRecipes),
                         [](const auto& info) { return std::string(info.param.first); });

// Processes: dropout draws from the process's one generator.
TEST_P(ReplicateAndCheckpoint, GiveTheGradientsOfReplicateAlone) {
  run_processes(2, [recipe = GetParam().second] {
    for (const auto& options :
         {ReplicateOptions{}, ReplicateOptions{.bucket_cap_mb = 0.001, .overlap = true},
          ReplicateOptions{.gradient_as_bucket_view = true},
          ReplicateOptions{.static_graph = true}}) {
      auto [plain, subject] = twins<Parts>(11);
      replicate(plain, options);
      recipe(subject, options);
      for (int step = 0; step < 3; ++step) {
        torch::manual_seed(100 * step + rank());
        const auto x = torch::randn({4, 8});
        for (auto* net : {&plain, &subject}) {
          torch::manual_seed(7 + rank());
          (*net)->zero_grad();
          (*net)(x).pow(2).sum().backward();
        }
        const auto expected = plain->named_parameters();
        for (const auto& item : subject->named_parameters())
          EXPECT_TRUE(at::equal(item.value().grad(), expected[item.key()].grad())) << item.key();
      }
      EXPECT_GT(subject->parts[0]->calls, plain->parts[0]->calls) << "nothing was recomputed";
    }
  });
}

}  // namespace
}  // namespace tessera::testing
