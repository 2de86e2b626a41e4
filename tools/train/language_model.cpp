#include "train/language_model.h"

#include <tessera/fully_shard.h>
#include <tessera/models.h>

#include "train/export.h"
#include "train/model.h"

#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <unordered_map>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using models::DecoderConfig;
using models::Family;

/// Of a sequence, unless --context says: what published models have would be large batches.
constexpr int64_t kContextOfPublished = 1024;
constexpr int64_t kMultipleOfFeedForward = 64;

class GptModel final : public LanguageModel {
 public:
  explicit GptModel(Gpt net) : net_(std::move(net)) {}

  std::shared_ptr<torch::nn::Module> module() const override { return net_.ptr(); }
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const override {
    return net_->blocks()->children();
  }
  /// A layer cut by outputs followed by one cut by inputs: one all-reduce for the two.
  ParallelPlan tensor_plan() const override {
    const auto heads = net_->shape().heads;
    return {{"blocks.*.qkv", ColwiseParallel({.heads = heads})},
            {"blocks.*.projection", RowwiseParallel({.heads = heads})},
            {"blocks.*.up", ColwiseParallel()},
            {"blocks.*.down", RowwiseParallel()}};
  }
  ParallelPlan context_plan() const override {
    return {{"blocks.*", ContextParallel()}, {"positions", ContextParallel()}};
  }
  at::Tensor logits(const at::Tensor& tokens) override {
    if (!pipeline_) return net_(tokens);
    auto own = pipeline_->forward(enough_rows(tokens));
    const auto& shape = net_->shape();
    own = own.defined() ? own.narrow(0, 0, tokens.size(0)).contiguous()
                        : at::empty({tokens.size(0), tokens.size(1), shape.vocabulary},
                                    tokens.options().dtype(at::kFloat));
    return broadcast(own, pipeline_->table().stage_ranks.back(), stages_->group());
  }
  void cut(PipelineOptions options) override {
    options.loss_fn = next_token_loss;
    stages_ = options.mesh;
    chain_ = net_->chain();
    pipeline_ = tessera::pipeline(chain_, std::move(options));
  }
  Pipeline* pipeline() override { return pipeline_ ? &*pipeline_ : nullptr; }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                  const at::Tensor& positions) override {
    if (pipeline_) return pipeline_->eval(enough_rows(tokens), enough_rows(targets));
    return next_token_loss(positions.defined() ? net_->packed(tokens, positions) : net_(tokens),
                           targets);
  }
  /// It has started on the CPU, with the same values on any device.
  void place(c10::Device device) override { net_->to(device); }
  std::function<void(torch::nn::Module&)> start_values() const override { return {}; }
  void load(const std::string& /*folder*/) override {
    TORCH_INTERNAL_ASSERT(false, "--from has a model of its own");
  }
  void export_to(const std::string& folder, const std::string& tokenizer) override {
    export_pretrained(as_gpt2(net_), folder, tokenizer);
  }
  std::string config() const override { return {}; }
  std::string name() const override { return "GPT"; }
  /// qkv, projection, up and down of each block. Looking embeddings up multiplies nothing.
  double weights_in_products() const override {
    const auto& shape = net_->shape();
    const auto width = static_cast<double>(shape.width);
    return static_cast<double>(shape.blocks) * 12 * width * width +
           width * static_cast<double>(shape.vocabulary);
  }
  int64_t attention_width() const override { return net_->shape().width; }

 private:
  /// One for each microbatch; all are there equally often, so that means stay what they are.
  at::Tensor enough_rows(const at::Tensor& rows) const {
    const auto least = pipeline_->table().microbatches, own = static_cast<int>(rows.size(0));
    return own >= least ? rows : rows.repeat({(least + own - 1) / own, 1});
  }

  Gpt net_;
  nn::Sequential chain_ = nullptr;  // of net_, where it is cut
  std::optional<Pipeline> pipeline_;
  std::optional<DeviceMesh> stages_;
};

class PublishedModel final : public LanguageModel {
 public:
  PublishedModel(models::CausalLM net, uint64_t seed) : net_(std::move(net)), seed_(seed) {}

  std::shared_ptr<torch::nn::Module> module() const override { return net_.ptr(); }
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const override { return net_->blocks(); }
  ParallelPlan tensor_plan() const override { return models::tensor_plan(net_); }
  ParallelPlan context_plan() const override { return models::context_plan(net_); }
  void cut(PipelineOptions /*options*/) override {
    TORCH_INTERNAL_ASSERT(false, "settings refuse it");
  }
  Pipeline* pipeline() override { return nullptr; }
  at::Tensor logits(const at::Tensor& tokens) override { return net_(tokens); }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                  const at::Tensor& positions) override {
    return positions.defined() ? net_->packed_loss(tokens, targets, positions)
                               : net_->loss(tokens, targets);
  }
  void place(c10::Device device) override {
    models::materialize(net_, {.device = device}, start_values());
  }
  /// Each module draws by a seed of its own, so that values do not hang on which come first:
  /// fully_shard has another order.
  std::function<void(torch::nn::Module&)> start_values() const override {
    std::unordered_map<const torch::nn::Module*, uint64_t> seeds;
    for (const auto& module : net_->modules())
      seeds.emplace(module.get(), seed_ + kBetweenSeeds * (seeds.size() + 1));
    return [seeds = std::move(seeds), start = models::param_init_fn(net_)](auto& module) {
      torch::manual_seed(seeds.at(&module));
      start(module);
    };
  }
  void load(const std::string& folder) override { models::load_pretrained(folder, net_); }
  void export_to(const std::string& folder, const std::string& tokenizer) override {
    export_pretrained(net_, folder, tokenizer);
  }
  std::string config() const override { return models::config_text(net_->config()); }
  std::string name() const override { return models::name_of(net_->config().family); }
  double weights_in_products() const override {
    const auto& config = net_->config();
    double weights = 0;
    for (const auto& parameter : net_->named_parameters()) {
      const auto& key = parameter.key();
      const bool is_looked_up = key.ends_with("embed_tokens.weight") ||
                                key.ends_with("wte.weight") || key.ends_with("wpe.weight");
      if (parameter.value().dim() > 1 && !is_looked_up)
        weights += static_cast<double>(parameter.value().numel());
    }
    const bool has_head = !config.tie_word_embeddings;
    return weights + (has_head ? 0 : static_cast<double>(config.vocab_size * config.hidden_size));
  }
  int64_t attention_width() const override {
    return net_->config().num_attention_heads * net_->config().size_of_head();
  }

 private:
  static constexpr uint64_t kBetweenSeeds = 0x9E3779B97F4A7C15;  // far apart for neighbours

  models::CausalLM net_;
  uint64_t seed_;
};

bool is_gpt(const Settings& settings) { return settings.model == "gpt"; }

/// A size that is given counts, unless weights decide.
void take_size(const Settings& settings, const char* flag, int64_t given, int64_t& size) {
  if (given == 0) return;
  TORCH_CHECK_VALUE(settings.from.empty() || given == size, flag,
                    ": expected none with --from, whose weights have sizes of their own (", size,
                    "), got ", given);
  size = given;
}

DecoderConfig smallest_config(const Settings& settings) {
  const auto family = models::family_of(settings.model);
  const bool is_gpt2 = family == Family::GPT2;
  const auto in_multiples = (settings.width * 8 / 3 + kMultipleOfFeedForward - 1) /
                            kMultipleOfFeedForward * kMultipleOfFeedForward;
  return {.family = family,
          .vocab_size = 256,
          .hidden_size = settings.width,
          .intermediate_size = is_gpt2 ? 4 * settings.width : in_multiples,
          .num_hidden_layers = settings.blocks,
          .num_attention_heads = settings.heads,
          .num_key_value_heads = settings.heads,
          .max_position_embeddings = settings.context,
          .norm_eps = is_gpt2 ? 1e-5 : 1e-6,
          .tie_word_embeddings = is_gpt2};
}

/// What the settings ask for, but for a vocabulary that they leave to the tokenizer.
DecoderConfig config_of(const Settings& settings) {
  auto config = !settings.from.empty()     ? models::read_config(settings.from)
                : !settings.preset.empty() ? models::preset(settings.preset)
                                           : smallest_config(settings);
  const bool is_gpt2 = config.family == Family::GPT2;
  const auto width = config.hidden_size, heads = config.num_attention_heads;
  take_size(settings, "--blocks", settings.blocks, config.num_hidden_layers);
  take_size(settings, "--width", settings.width, config.hidden_size);
  take_size(settings, "--heads", settings.heads, config.num_attention_heads);
  if (config.hidden_size != width || config.num_attention_heads != heads) {
    config.head_dim = std::nullopt;  // of a published model, whose sizes these are not
    if (settings.kv_heads == 0) config.num_key_value_heads = config.num_attention_heads;
    if (is_gpt2 && settings.feed_forward == 0) config.intermediate_size = 4 * config.hidden_size;
  }
  take_size(settings, "--kv-heads", settings.kv_heads, config.num_key_value_heads);
  take_size(settings, "--feed-forward", settings.feed_forward, config.intermediate_size);
  take_size(settings, "--vocabulary", settings.vocabulary, config.vocab_size);
  if (settings.tie_head) {
    TORCH_CHECK_VALUE(settings.from.empty() || *settings.tie_head == config.tie_word_embeddings,
                      "--tie-head: expected none with --from, whose weights have ",
                      config.tie_word_embeddings ? "a tied head" : "a head of its own");
    config.tie_word_embeddings = *settings.tie_head;
  }
  TORCH_CHECK_VALUE(is_gpt2 || settings.dropout == 0, "--dropout: expected 0 with models of kind ",
                    models::name_of(config.family), ", which have none, got ", settings.dropout);
  config.embd_pdrop = config.resid_pdrop = config.attention_dropout = settings.dropout;
  models::check(config);
  return config;
}

/// Of --from or of token shards, unless the user says.
std::string tokenizer_of(const Settings& settings) {
  if (settings.tokenizer != "auto") return settings.tokenizer;
  if (settings.from.empty()) {
    const bool has_data = settings.sft.empty() && !settings.data.empty();
    const auto of_shards =
        has_data ? data::Corpus::tokenizer_of_shards(settings.data.front()) : std::nullopt;
    return of_shards.value_or("bytes");
  }
  const auto file = fs::path(settings.from) / "tokenizer.json";
  std::error_code ignored;
  TORCH_CHECK_VALUE(fs::exists(file, ignored), "--from: expected a tokenizer.json in '",
                    settings.from, "', found none; name one, or bytes, with --tokenizer");
  return file.string();
}

void refuse_decoders_flags(const Settings& settings) {
  const std::pair<const char*, bool> flags[] = {{"--kv-heads", settings.kv_heads != 0},
                                                {"--feed-forward", settings.feed_forward != 0},
                                                {"--tie-head", settings.tie_head.has_value()}};
  for (const auto& [flag, is_given] : flags) {
    TORCH_CHECK_VALUE(!is_given, flag,
                      ": expected it with --model gpt2, llama, qwen2 or qwen3, a --preset or "
                      "--from; --model gpt has none");
  }
}

}  // namespace

Settings with_sizes(Settings settings) {
  settings.tokenizer = tokenizer_of(settings);
  if (settings.model == "auto" && !is_published(settings)) settings.model = "gpt";
  if (is_gpt(settings) && !is_published(settings)) {
    refuse_decoders_flags(settings);
    return settings;
  }
  const auto config = config_of(settings);
  const std::string family = models::name_of(config.family);
  TORCH_CHECK_VALUE(settings.model == "auto" || settings.model == family, "--model: expected ",
                    family, ", which is what ",
                    settings.from.empty() ? "--preset " + settings.preset : "--from", " has, got ",
                    settings.model);
  settings.model = family;
  settings.blocks = config.num_hidden_layers;
  settings.width = config.hidden_size;
  settings.heads = config.num_attention_heads;
  settings.kv_heads = config.num_key_value_heads;
  settings.feed_forward = config.intermediate_size;
  if (is_published(settings)) settings.vocabulary = config.vocab_size;
  settings.tie_head = config.tie_word_embeddings;
  if (settings.context == 0)
    settings.context = std::min(config.max_position_embeddings, kContextOfPublished);
  TORCH_CHECK_VALUE(settings.context <= config.max_position_embeddings,
                    "--context: expected at most ", config.max_position_embeddings,
                    ", the positions that the model has, got ", settings.context);
  return settings;
}

data::Tokenizer make_tokenizer(const Settings& settings) {
  const auto tokenizer = tokenizer_of(settings);
  return tokenizer == "bytes" ? data::Tokenizer() : data::Tokenizer::from_file(tokenizer);
}

Model make_language_model(const Settings& settings, int64_t vocabulary) {
  const auto rows = settings.vocabulary == 0 ? vocabulary : settings.vocabulary;
  TORCH_CHECK_VALUE(vocabulary <= rows, "--vocabulary: expected at least ", vocabulary,
                    ", the tokens of --tokenizer, got ", rows,
                    is_published(settings) ? ", which the model has" : "");
  if (is_gpt(settings))
    return std::make_shared<GptModel>(Gpt(ModelShape{.vocabulary = rows,
                                                     .blocks = settings.blocks,
                                                     .width = settings.width,
                                                     .heads = settings.heads,
                                                     .context = settings.context,
                                                     .dropout = settings.dropout}));
  auto config = config_of(settings);
  config.vocab_size = rows;
  const MetaInit no_memory;
  return std::make_shared<PublishedModel>(models::CausalLM(std::move(config)), settings.seed);
}

}  // namespace tessera::train
