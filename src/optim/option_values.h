#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>

/// Options of a parameter group by name, whatever optimizer they belong to: what they write into an
/// archive.
namespace tessera::optim {

using OptionValues = std::map<std::string, c10::IValue>;

OptionValues read_options(const torch::optim::OptimizerOptions& options);

/// `given` as the optimizer that has `own` takes it. Options that torch::optim's do not have:
/// which kernels run stays as it is, everything else has to be what torch::optim does. Throws a
/// ValueError that begins with `where` unless names, types and ranges fit.
OptionValues fitted_options(const std::string& where, const OptionValues& own,
                            const OptionValues& given);

/// Takes what fitted_options gave. Throws what the options throw of values that they refuse.
void write_options(torch::optim::OptimizerOptions& options, const OptionValues& values);

/// A copy of `own` with the values of `given`; throws as fitted_options.
std::unique_ptr<torch::optim::OptimizerOptions> loaded_options(
    const std::string& where, const torch::optim::OptimizerOptions& own, const OptionValues& given);

}  // namespace tessera::optim
