#pragma once

#include <tessera/optim.h>

#include "train/settings.h"

#include <torch/nn/module.h>

#include <string>

namespace tessera::train {

/// How far a run is, in steps of --steps: those done, or more if more of --minutes has passed.
double schedule_position(const Settings& settings, int64_t step, double elapsed_seconds);

/// "stopped after 3 minutes, as --minutes asks, at step 1433 of 1500; go on with --resume …". An
/// empty `folder`: the run has no checkpoint to go on from.
std::string stopped_by_time(const Settings& settings, int64_t step, const std::string& folder);

/// Rises in a line for --warmup steps, then falls along a cosine to --min-lr; at a position from 0.
double learning_rate(const Settings& settings, double position);

/// AdamW with weight decay for matrices alone: vectors (norms and biases) have none.
optim::AdamW make_optimizer(const torch::nn::Module& model, const Settings& settings);

/// Gives all groups the settings' options, whatever a checkpoint said.
void set_options(optim::AdamW& optimizer, const Settings& settings);
void set_learning_rate(optim::AdamW& optimizer, double rate);

}  // namespace tessera::train
