#pragma once

#include <tessera/optim.h>

#include "base/capture.h"

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>

namespace tessera::optim {

/// The options of one parameter group in the form that libtorch's schedulers and archives know.
template <class Options>
class GroupOptions final : public torch::optim::OptimizerOptions {
 public:
  explicit GroupOptions(Options options) : values(std::move(options)) {}

  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return values.lr; }
  void set_lr(double lr) override {
    // A scheduler counts its steps, which a recording of this one does not show.
    capture::tell([](capture::Observer& observer) {
      observer.give_up(
          "it sets a learning rate itself, which its program would not do; call the "
          "scheduler after it");
    });
    values.lr = lr;
  }

  Options values;
};

/// Throws a ValueError in the name of the optimizer unless every number makes sense.
void check_options(const SGDOptions& options);
void check_options(const AdamOptions& options);
void check_options(const AdamWOptions& options);
void check_options(const MuonOptions& options);
void check_options(const AdafactorOptions& options);

/// For constructors: the defaults of an optimizer.
template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> checked_defaults(const Options& options) {
  check_options(options);
  return std::make_unique<GroupOptions<Options>>(options);
}

/// The options of a group of this optimizer; of another kind: a TypeError.
template <class Options>
Options& options_as(torch::optim::OptimizerOptions& options, const char* optimizer);

}  // namespace tessera::optim

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
