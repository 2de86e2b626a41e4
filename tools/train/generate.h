#pragma once

#include <tessera/corpus.h>

#include "train/language_model.h"
#include "train/parallelize.h"
#include "train/sequences.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

struct GenerateOptions {
  std::vector<int64_t> prompt;
  std::optional<int64_t> end;  // the token that ends the text, if any does
  int64_t count, context;
  uint64_t seed;
  std::optional<DeviceMesh> context_mesh =
      std::nullopt;  // along which the model's sequences are cut
};

/// Writes up to `count` tokens behind the prompt, drawn from the model's eight most likely at each
/// place. It sees `context` of them at most. Every rank calls it and gets the same text.
std::string generate(LanguageModel& model, const data::Tokenizer& tokenizer,
                     const GenerateOptions& options, at::Device device);

/// --prompt and what follows it; of a model of conversations, what answers it. Every rank calls it.
std::string sample_text(LanguageModel& model, const Sequences& sequences, const Settings& settings,
                        const Layout& layout, at::Device device);

}  // namespace tessera::train
