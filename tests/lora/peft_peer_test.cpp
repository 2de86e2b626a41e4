// Against Hugging Face's own `peft`: what it has saved, trains and loads of ours.
#include <tessera/lora.h>
#include <tessera/optim.h>

#include "models/small_models.h"
#include "support/peer.h"
#include "support/temporary_folder.h"

namespace tessera::testing {
namespace {

class PeftPeer : public ::testing::TestWithParam<const char*> {
 protected:
  std::string at(const char* name) const { return (folder_.path() / name).string(); }
  PeerResult run(bool is_ours) {
    PeerOptions options{
        .environment = {{"FAMILY", GetParam()}, {"FOLDER", folder_.path().string()}}};
    if (is_ours) options.environment["OURS"] = "1";
    return run_peer(TESSERA_PEFT_PEER, {{"tokens", batch_.tokens}, {"targets", batch_.targets}},
                    options);
  }
  static void expect_close(const at::Tensor& ours, const at::Tensor& theirs, const char* what) {
    ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
    EXPECT_LE((ours - theirs).abs().max().item<double>(), 2e-5) << what;
  }

  TemporaryFolder folder_;
  SmallBatch batch_ = small_batch();
};

TEST_P(PeftPeer, ComputesTrainsAndLoadsAlike) {
  if (const auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const auto made = run(/*is_ours=*/false);
  ASSERT_TRUE(made.ok());
  if (made.tensors.empty()) GTEST_SKIP() << made.output;
  auto net = models::from_pretrained(at("base"));
  lora(net, read_lora_options(at("start")));
  load_lora(at("start"), net);
  expect_close(net(batch_.tokens), made["logits"], "logits");
  optim::SGD sgd(lora_parameters(net), {.lr = 0.1});
  const auto loss = net->loss(batch_.tokens, batch_.targets);
  expect_close(loss, made["loss"], "loss");
  loss.backward();
  sgd.step();
  save_lora(at("ours"), net, {.fan_in_fan_out = GetParam() == std::string("gpt2")});
  expect_same_files(at("ours") + "/adapter_model.safetensors",
                    at("trained") + "/adapter_model.safetensors");
  const at::Tensor logits = net(batch_.tokens).detach();
  merge_lora(net);
  models::save_pretrained(net, at("merged"));
  const auto loaded = run(/*is_ours=*/true);
  ASSERT_TRUE(loaded.ok());
  expect_close(logits, loaded["logits"], "of our adapters");
  expect_close(logits, loaded["merged"], "of our merged model");
}

INSTANTIATE_TEST_SUITE_P(Families, PeftPeer, ::testing::Values("gpt2", "qwen2"),
                         [](const auto& chosen) { return std::string(chosen.param); });

}  // namespace
}  // namespace tessera::testing
