#pragma once

#include <tessera/optim.h>

#include "train/language_model.h"

#include <memory>

namespace tessera::train {

/// The averages of --ema, of a model that is spread over ranks; null without it.
std::unique_ptr<optim::ExponentialMovingAverage> make_average(const LanguageModel& model,
                                                              const Settings& settings);

/// What a checkpoint of a run holds: the model's modules under their names and beside them, as
/// "ema", the averages, if there are any.
std::shared_ptr<torch::nn::Module> module_with(const LanguageModel& model,
                                               optim::ExponentialMovingAverage* average);

/// The averages in place of the model's weights, for good. In one process.
void take_averages(LanguageModel& model, optim::ExponentialMovingAverage& average);

}  // namespace tessera::train
