#pragma once

#include <tessera/optim.h>

#include "train/language_model.h"
#include "train/settings.h"

#include <memory>
#include <string>

namespace tessera::train {

/// How far a run is, in steps of --steps: those done, or more if more of --minutes has passed.
double schedule_position(const Settings& settings, int64_t step, double elapsed_seconds);

/// "stopped after 3 minutes, as --minutes asks, at step 1433 of 1500; go on with --resume …". An
/// empty `folder`: the run has no checkpoint to go on from.
std::string stopped_by_time(const Settings& settings, int64_t step, const std::string& folder);

/// Rises in a line for --warmup steps, then falls along a cosine to --min-lr; at a position from 0.
double learning_rate(const Settings& settings, double position);

/// AdamW, or Muon for the matrices in blocks and AdamW for what is beside them, with one learning
/// rate. Weight decay is for matrices alone: vectors (norms and biases) have none.
std::unique_ptr<optim::Optimizer> make_optimizer(const LanguageModel& model,
                                                 const Settings& settings);
/// Whether the device itself leaves a step out whose gradients are not finite; else the host reads
/// whether they are.
bool decides_on_device(const Settings& settings);

/// Gives all groups the settings' options, whatever a checkpoint said.
void set_options(optim::Optimizer& optimizer, const Settings& settings);
void set_learning_rate(optim::Optimizer& optimizer, double rate);

}  // namespace tessera::train
