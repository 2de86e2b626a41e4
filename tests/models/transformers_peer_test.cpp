// Against Hugging Face's own `transformers`: what it has saved, and what it loads of ours.
#include <tessera/models.h>
#include <tessera/optim.h>

#include "models/small_models.h"
#include "support/peer.h"
#include "support/temporary_folder.h"

#include <filesystem>
#include <string>

namespace tessera::testing {
namespace {

using models::CausalLM;

constexpr double kClose = 1e-5;

void expect_close(const at::Tensor& ours, const at::Tensor& theirs, const std::string& what) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  EXPECT_LE((ours - theirs).abs().max().item<double>(), kClose) << what;
}

void train(CausalLM& net, torch::optim::Optimizer& optimizer, const SmallBatch& batch) {
  optimizer.zero_grad();
  net->loss(batch.tokens, batch.targets).backward();
  optimizer.step();
}

class TransformersPeer : public ::testing::TestWithParam<const char*> {
 protected:
  PeerResult run(const std::map<std::string, std::optional<std::string>>& environment) {
    PeerOptions options{.environment = environment};
    options.environment["FAMILY"] = GetParam();
    options.environment["FOLDER"] = folder_.path().string();
    return run_peer(TESSERA_TRANSFORMERS_PEER,
                    {{"tokens", batch_.tokens}, {"targets", batch_.targets}}, options);
  }
  /// Loads what the peer made, trains as it did and saves; gives the logits then.
  at::Tensor follow(const std::string& variant, const PeerResult& made) {
    const auto place = folder_.path() / variant;
    auto net = models::from_pretrained((place / "start").string());
    const at::Tensor logits = net(batch_.tokens);
    expect_close(logits, made[variant + ".logits"], variant);
    expect_close(net->loss(batch_.tokens, batch_.targets), made[variant + ".loss"], variant);
    optim::SGD sgd(net->parameters(), {.lr = 0.1});
    train(net, sgd, batch_);
    optim::AdamW adamw(net->parameters(), {.lr = 1e-3, .eps = 1e-5, .weight_decay = 0.1});
    train(net, adamw, batch_);
    const auto ours = (place / "ours").string();
    models::save_pretrained(net, ours, {.max_shard_bytes = variant == "tied" ? 5000000 : 20000});
    expect_same_files(ours, (place / "trained").string());
    return net(batch_.tokens).detach();
  }

  TemporaryFolder folder_;
  SmallBatch batch_ = small_batch();
};

TEST_P(TransformersPeer, ComputesTrainsAndLoadsAlike) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto made = run({});
  ASSERT_TRUE(made.ok());
  if (made.tensors.empty()) GTEST_SKIP() << made.output;
  std::map<std::string, at::Tensor> logits;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
    const auto variant = entry.path().filename().string();
    SCOPED_TRACE(variant);
    logits[variant] = follow(variant, made);
  }
  EXPECT_EQ(logits.size(), GetParam() == std::string("qwen2") ? 5U : 2U);
  const auto loaded = run({{"OURS", "1"}});
  ASSERT_TRUE(loaded.ok());
  for (const auto& [variant, ours] : logits)
    expect_close(ours, loaded[variant + ".logits"], variant);
}

INSTANTIATE_TEST_SUITE_P(Families, TransformersPeer,
                         ::testing::Values("gpt2", "llama", "qwen2", "qwen3"),
                         [](const auto& chosen) { return std::string(chosen.param); });

}  // namespace
}  // namespace tessera::testing
