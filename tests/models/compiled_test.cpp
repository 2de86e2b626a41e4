// Steps of the models as programs.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/models.h>
#include <tessera/optim.h>

#include "models/small_models.h"

namespace tessera::testing {
namespace {

using models::CausalLM;
using models::Family;

class CompiledModels : public ::testing::TestWithParam<Family> {};

TEST_P(CompiledModels, TrainAsTheyDoEagerly) {
  const auto config = small_config(GetParam(), /*is_tied=*/true);
  CausalLM nets[2] = {small_model(config), small_model(config)};
  for (const auto& block : nets[1]->blocks()) checkpoint(block);
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), {.lr = 1e-3, .fused = true}),
                                optim::AdamW(nets[1]->parameters(), {.lr = 1e-3, .fused = true})};
  const auto step = [&](int of, const at::Tensor& tokens, const at::Tensor& targets) {
    optimizers[of].zero_grad();
    const auto loss = nets[of]->loss(tokens, targets);
    loss.backward();
    optimizers[of].step();
    return loss;
  };
  auto compiled = compile(
      [&](at::Tensor tokens, at::Tensor targets) { return step(1, tokens, targets); },
      {.module = nets[1], .optimizer = optimizers[1], .fullgraph = true, .backend = "interpret"});
  const auto batch = small_batch();
  for (int i = 0; i < 4; ++i) {
    const auto eager = step(0, batch.tokens, batch.targets);
    EXPECT_NEAR(compiled(batch.tokens, batch.targets).item<double>(), eager.item<double>(), 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, CompiledModels,
                         ::testing::Values(Family::GPT2, Family::Llama, Family::Qwen2,
                                           Family::Qwen3),
                         [](const auto& chosen) {
                           return std::string(models::name_of(chosen.param));
                         });

}  // namespace
}  // namespace tessera::testing
