#pragma once

#include "train/step.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// Runs forward once more, without gradients and without a trace in random numbers or buffers: the
/// first module whose output is not finite on any rank, as "blocks.3.up on rank 1". Every rank
/// calls it. None: forward is finite everywhere.
std::optional<std::string> find_nonfinite(Gpt& model, TrainStep& step,
                                          const std::vector<Batch>& batches);

}  // namespace tessera::train
