#pragma once

#include <tessera/corpus.h>

#include "train/language_model.h"

#include <string>

namespace tessera::train {

/// Writes `count` tokens behind the prompt, drawn from the model's eight most likely at each place.
/// It sees `context` of them at most. Every rank calls it and gets the same text.
std::string generate(LanguageModel& model, const data::Tokenizer& tokenizer,
                     const std::string& prompt, int64_t count, int64_t context, uint64_t seed,
                     at::Device device);

}  // namespace tessera::train
