#pragma once

#include "train/batches.h"
#include "train/model.h"

#include <nlohmann/json.hpp>

namespace tessera::train {

/// What a reader of a run wants to know of it besides its settings: ranks, mesh, data, and how each
/// parameter is spread over the ranks. Every rank calls it.
nlohmann::json facts_of(const Gpt& model, const Layout& layout, const Batches& batches,
                        const std::string& command);

int64_t parameter_count(const Gpt& model);

}  // namespace tessera::train
