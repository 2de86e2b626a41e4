#include "train/batches.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::train {
namespace {

constexpr int64_t kMostValidationSequences = 64;

data::Tokenizer tokenizer_of(const Settings& settings) {
  return settings.tokenizer == "bytes" ? data::Tokenizer()
                                       : data::Tokenizer::from_file(settings.tokenizer);
}

int64_t validation_part(const Settings& settings, int64_t sequences) {
  if (settings.validation == 0) return 0;
  return std::max<int64_t>(
      1, static_cast<int64_t>(settings.validation * static_cast<double>(sequences)));
}

/// Sequences overlap by one token: the last target of one is the first token of the next.
int64_t sequences_of(const data::Corpus& corpus, const Settings& settings) {
  const auto sequences = (corpus.tokens() - 1) / settings.context;
  const int64_t needed = settings.validation == 0 ? 1 : 2;
  TORCH_CHECK_VALUE(sequences >= needed, "train: expected text of at least ",
                    needed * settings.context + 1, " tokens (--context ", settings.context,
                    "), got ", corpus.tokens(), " in ", corpus.files(),
                    " file(s); give more --data or a shorter --context");
  return sequences;
}

}  // namespace

Batches::Batches(const Settings& settings, const Layout& layout, at::Device device)
    : corpus_(settings.data, tokenizer_of(settings)),
      context_(settings.context),
      data_rank_(layout.data_rank),
      data_ranks_(layout.data_ranks),
      device_(device),
      validation_sequences_(validation_part(settings, sequences_of(corpus_, settings))),
      sampler_(sequences_of(corpus_, settings) - validation_sequences_,
               {.seed = settings.seed,
                .rank = static_cast<int>(layout.data_rank),
                .world_size = static_cast<int>(layout.data_ranks)}) {}

Batch Batches::read(const std::vector<int64_t>& sequences) const {
  const auto windows = corpus_.windows(sequences, context_, context_ + 1);
  return {.tokens = windows.narrow(1, 0, context_).contiguous().to(device_),
          .targets = windows.narrow(1, 1, context_).contiguous().to(device_)};
}

Batch Batches::next(int64_t sequences) { return read(sampler_.next(sequences)); }

int64_t Batches::validations(int64_t sequences) const {
  const auto taken = std::min(validation_sequences_, kMostValidationSequences);
  return (taken + sequences * data_ranks_ - 1) / (sequences * data_ranks_);
}

std::pair<Batch, int64_t> Batches::validation(int64_t number, int64_t sequences) const {
  const auto taken = std::min(validation_sequences_, kMostValidationSequences);
  const auto place = [&](int64_t i) {  // spread over the whole of it
    return sampler_.samples() + i * validation_sequences_ / taken;
  };
  std::vector<int64_t> chosen;
  const auto first = (number * data_ranks_ + data_rank_) * sequences;
  for (int64_t i = first; i < std::min(first + sequences, taken); ++i) chosen.push_back(place(i));
  const auto counted = static_cast<int64_t>(chosen.size());
  if (chosen.empty()) chosen.push_back(place(0));
  return {read(chosen), counted};
}

}  // namespace tessera::train
