#include <tessera/dtensor.h>
#include <tessera/models.h>
#include <tessera/nn/hooks.h>

#include <c10/util/Exception.h>

namespace tessera::models {
namespace {

/// A norm of each head, [batch, length, heads, head_dim], where a rank has some of the heads: its
/// weight is on all ranks and has the sum of their gradients.
class HeadNormParallel final : public ParallelStyle {
 public:
  void apply(const StyleTarget& target) const override {
    for (auto& parameter : target.module.parameters(/*recurse=*/false))
      distribute_tensor_(parameter, target.mesh, {Replicate()}, target.src_data_rank);
    register_forward_pre_hook(target.module,
                              [mesh = target.mesh](torch::nn::Module&, nn::Arguments& arguments) {
                                auto& x = arguments.tensor(0);
                                x = DTensor::from_local(x, mesh, {Shard(2)});
                              });
    register_forward_hook(target.module,
                          [](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
                            auto& x = result.tensor();
                            x = DTensor::of(x).to_local();
                          });
  }
};

ParallelPlan plan_of_gpt2(const DecoderConfig& config) {
  const auto heads = config.num_attention_heads;
  return {{"transformer.wte", RowwiseParallel()},
          {"transformer.h.*.attn.c_attn", ColwiseParallel({.heads = heads, .packed = 3})},
          {"transformer.h.*.attn.c_proj", RowwiseParallel({.heads = heads})},
          {"transformer.h.*.mlp.c_fc", ColwiseParallel()},
          {"transformer.h.*.mlp.c_proj", RowwiseParallel()}};
}

ParallelPlan plan_of_decoder(const DecoderConfig& config) {
  const auto heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  std::vector<PlanEntry> plan = {
      {"model.embed_tokens", RowwiseParallel()},
      {"model.layers.*.self_attn.q_proj", ColwiseParallel({.heads = heads})},
      {"model.layers.*.self_attn.k_proj", ColwiseParallel({.heads = kv_heads})},
      {"model.layers.*.self_attn.v_proj", ColwiseParallel({.heads = kv_heads})},
      {"model.layers.*.self_attn.o_proj", RowwiseParallel({.heads = heads})},
      {"model.layers.*.mlp.gate_proj", ColwiseParallel()},
      {"model.layers.*.mlp.up_proj", ColwiseParallel()},
      {"model.layers.*.mlp.down_proj", RowwiseParallel()}};
  if (config.family == Family::Qwen3)
    plan.push_back({"model.layers.*.self_attn.[qk]_norm", HeadNormParallel()});
  return plan;
}

}  // namespace

ParallelPlan tensor_plan(const CausalLM& model) {
  const auto& config = model->config();
  auto plan =
      (config.family == Family::GPT2 ? plan_of_gpt2(config) : plan_of_decoder(config)).entries();
  if (!config.tie_word_embeddings)
    plan.push_back({"lm_head", ColwiseParallel({.output_layouts = Replicate()})});
  return plan;
}

ParallelPlan context_plan(const CausalLM& model, const ContextParallelOptions& options) {
  const ContextParallel style(options);
  if (model->config().family == Family::GPT2)
    return {{"transformer.h.*.attn", style}, {"transformer.wpe", style}};
  return {{"model.layers.*.self_attn", style}, {"model.rotary_emb", style}};
}

}  // namespace tessera::models
