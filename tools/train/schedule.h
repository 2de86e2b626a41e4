#pragma once

#include <tessera/optim.h>

#include "train/settings.h"

#include <torch/nn/module.h>

namespace tessera::train {

/// Rises in a line for --warmup steps, then falls along a cosine to --min-lr. Steps count from 0.
double learning_rate(const Settings& settings, int64_t step);

/// AdamW with weight decay for matrices alone: vectors (norms and biases) have none.
optim::AdamW make_optimizer(const torch::nn::Module& model, const Settings& settings);

/// Gives all groups the settings' options, whatever a checkpoint said.
void set_options(optim::AdamW& optimizer, const Settings& settings);
void set_learning_rate(optim::AdamW& optimizer, double rate);

}  // namespace tessera::train
