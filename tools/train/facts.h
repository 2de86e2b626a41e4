#pragma once

#include "train/batches.h"
#include "train/language_model.h"
#include "train/settings.h"
#include "train/utilization.h"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace tessera::train {

/// What a reader of a run wants to know of it besides its settings: ranks, mesh, data, and how each
/// parameter is spread over the ranks. Every rank calls it.
nlohmann::json facts_of(const LanguageModel& model, const Layout& layout, const Batches& batches,
                        const std::string& command);

/// With the list of all starts of the run: those in `earlier`, the run.json before this start, and
/// this one, which begins with `first_step`. Command and time of the run are those of the first.
nlohmann::json with_starts(nlohmann::json facts, const std::string& earlier, int64_t first_step);

int64_t parameter_count(const LanguageModel& model);

/// What is trained, on what and where: the first lines of a run.
std::vector<std::string> introduction(const LanguageModel& model, const Batches& batches,
                                      const Layout& layout, const std::vector<UsedDevice>& devices,
                                      const Settings& settings, const CompileChoice& compile,
                                      const std::string& folder);

}  // namespace tessera::train
