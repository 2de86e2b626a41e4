#pragma once

#include "train/language_model.h"
#include "train/settings.h"

/// Training adapters in place of the model: --lora.
namespace tessera::train {

/// Gives the linear layers of blocks, or those of --lora-targets, adapters, and freezes the rest;
/// nothing without --lora. Every rank calls it, before what replicates or shards. Throws a
/// ValueError that names the flag.
void add_adapters(LanguageModel& model, const Settings& settings);

}  // namespace tessera::train
