#pragma once

#include <tessera/corpus.h>

#include "train/model.h"

#include <string>

namespace tessera::train {

/// Writes `count` tokens behind the prompt, drawn from the model's eight most likely at each place.
/// Every rank calls it and gets the same text.
std::string generate(Gpt& model, const data::Tokenizer& tokenizer, const std::string& prompt,
                     int64_t count, uint64_t seed, at::Device device);

}  // namespace tessera::train
