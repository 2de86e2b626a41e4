#pragma once

#include <tessera/optim.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// The same training in Python and here.
namespace tessera::testing {

struct PeerCase {
  std::string name;
  std::string python;  // an expression that makes the optimizer of `params`
  std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor> params)> make;
  at::ScalarType dtype = at::kFloat;
  std::optional<double> clip = std::nullopt;  // the gradients' norm
  int step_lr = 0;                            // steps after which lr is multiplied by 0.3
};

/// Trains a small net for 50 steps on both sides; every parameter and every tensor of the state,
/// by name, must have the same bits at the end. One Python process for all cases. Skips the test
/// where there is no Python.
void expect_training_as_in_python(const std::vector<PeerCase>& cases);

/// As above with these parameters and gradients instead of a net: parameter i gets
/// gradients[i][step], from step first[i] on; before, it has none.
struct DrivenParameters {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;  // [steps, ...]
  std::vector<int64_t> first = {};    // none: 0 for all
};
void expect_driving_as_in_python(const DrivenParameters& parameters,
                                 const std::vector<PeerCase>& cases);

}  // namespace tessera::testing
