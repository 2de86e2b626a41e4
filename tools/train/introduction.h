#pragma once

#include "train/batches.h"
#include "train/compile_choice.h"
#include "train/utilization.h"

#include <string>
#include <vector>

namespace tessera::train {

/// What is trained, on what and where: the first lines of a run.
std::vector<std::string> introduction(const Gpt& model, const Batches& batches,
                                      const Layout& layout, const std::vector<UsedDevice>& devices,
                                      const Settings& settings, const CompileChoice& compile,
                                      const std::string& folder);

}  // namespace tessera::train
