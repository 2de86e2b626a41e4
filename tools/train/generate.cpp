#include "train/generate.h"

#include <tessera/comm.h>
#include <tessera/parallelize.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <torch/utils.h>

namespace tessera::train {
namespace {

constexpr int64_t kCandidates = 8;
constexpr double kTemperature = 0.8;

/// Bytes of a model that has not learned letters yet are shown as what they are: none.
std::string printable(const std::string& text) {
  std::string made;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const size_t length = byte < 0x80       ? 1
                          : byte >> 5 == 6  ? 2
                          : byte >> 4 == 14 ? 3
                          : byte >> 3 == 30 ? 4
                                            : 0;
    bool is_whole = length > 0 && i + length <= text.size();
    for (size_t k = 1; is_whole && k < length; ++k)
      is_whole = (static_cast<unsigned char>(text[i + k]) & 0xC0) == 0x80;
    const bool is_control = byte < 0x20 && byte != '\n' && byte != '\t';
    made += is_whole && !is_control ? text.substr(i, length) : "\uFFFD";
    i += is_whole ? length : 1;
  }
  return made;
}

/// Of what follows the window, where the model has all of it or, as of each sequence, a part.
at::Tensor last_logits(LanguageModel& model, at::Tensor window,
                       const std::optional<DeviceMesh>& context_mesh) {
  if (!context_mesh) return model.logits(window)[0][-1];
  // What stands behind the last token does not count for it.
  const auto chunks = 2 * context_mesh->size(), length = window.size(1);
  window = at::constant_pad_nd(window, {0, (chunks - length % chunks) % chunks});
  const auto part = model.logits(context_parallel_shard(window, /*seq_dim=*/1, *context_mesh));
  return context_parallel_unshard(part, /*seq_dim=*/1, *context_mesh)[0][length - 1];
}

}  // namespace

std::string generate(LanguageModel& model, const data::Tokenizer& tokenizer,
                     const GenerateOptions& options, at::Device device) {
  const torch::NoGradGuard no_grad;
  const auto root = model.module();
  const bool was_training = root->is_training();
  root->eval();
  auto generator = at::detail::createCPUGenerator(options.seed);
  auto tokens = options.prompt;
  if (tokens.empty()) tokens.push_back(0);
  const auto begin = tokens.size();
  for (int64_t i = 0; i < options.count; ++i) {
    const auto seen = std::min(static_cast<size_t>(options.context), tokens.size());
    const auto window =
        at::tensor(at::ArrayRef<int64_t>(tokens).slice(tokens.size() - seen), at::kLong);
    const auto last = last_logits(model, window.unsqueeze(0).to(device), options.context_mesh);
    // A model may have more rows than there are tokens.
    const auto logits = last.narrow(0, 0, tokenizer.vocabulary()).to(at::kCPU, at::kFloat);
    if (!at::isfinite(logits).all().item<bool>()) break;  // a model that has come to nothing
    const auto candidates = std::min<int64_t>(kCandidates, logits.size(0));
    const auto likely = at::topk(logits, candidates);
    const auto chances = at::softmax(std::get<0>(likely) / kTemperature, 0);
    const auto chosen = at::multinomial(chances, 1, /*replacement=*/false, generator);
    // Ranks see the same numbers; one that did not would leave the others' text for good.
    const at::Tensor token = broadcast(std::get<1>(likely).index_select(0, chosen).to(device));
    const auto chosen_token = token.item<int64_t>();
    if (chosen_token == options.end) break;
    tokens.push_back(chosen_token);
  }
  root->train(was_training);
  return printable(tokenizer.decode(at::ArrayRef<int64_t>(tokens).slice(begin)));
}

std::string sample_text(LanguageModel& model, const Sequences& sequences, const Settings& settings,
                        const Layout& layout, at::Device device) {
  const auto text = generate(model, sequences.tokenizer(),
                             {.prompt = sequences.prompt(settings.prompt),
                              .end = sequences.end(),
                              .count = settings.sample,
                              .context = settings.context,
                              .seed = settings.seed,
                              .context_mesh = layout.context},
                             device);
  // An answer does not go on where the prompt ends.
  return settings.prompt + (settings.sft.empty() ? "" : "\n\n") + text;
}

}  // namespace tessera::train
