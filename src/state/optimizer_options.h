#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>

/// Options of a parameter group by name, whatever optimizer they belong to: what they write into an
/// archive.
namespace tessera::state {

using OptionValues = std::map<std::string, c10::IValue>;

OptionValues read_options(const torch::optim::OptimizerOptions& options);
/// Throws what the options throw of values that they refuse.
void write_options(torch::optim::OptimizerOptions& options, const OptionValues& values);

}  // namespace tessera::state
