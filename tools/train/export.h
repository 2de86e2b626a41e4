#pragma once

#include <tessera/models.h>

#include "train/model.h"

#include <string>

/// Trained models as Hugging Face's folders.
namespace tessera::train {

/// The same model as a GPT-2 with a head of its own and the exact GELU: the same logits. Of one
/// that is whole, in this process.
models::CausalLM as_gpt2(const Gpt& net);

/// Config, weights and tokenizer ("bytes", or the path of a tokenizer.json, whose neighbours are
/// taken along), all of which `transformers` loads.
void export_pretrained(const models::CausalLM& net, const std::string& folder,
                       const std::string& tokenizer);

}  // namespace tessera::train
