#pragma once

#include <tessera/optim.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::state {

/// How the state of one kind of optimizer is read and written: tessera::optim's and torch::optim's
/// keep it differently, under the same names.
class OptimizerKind {
 public:
  virtual ~OptimizerKind() = default;
  /// The class, without its namespace: state goes from one library's to the other's.
  virtual const char* name() const = 0;
  virtual std::vector<std::string> state_names() const = 0;
  /// Those without which the state of such a parameter is not complete.
  virtual std::vector<std::string> required_names(const at::Tensor& parameter) const = 0;

  /// Whether parameters have state before their first step, and have to.
  virtual bool starts_with_state() const { return false; }

  /// Empty before the parameter's first step. Numbers come as tensors of one element.
  virtual optim::State read(const torch::optim::Optimizer& optimizer,
                            const at::Tensor& parameter) const = 0;
  /// Copies the values, which are placed as the parameter is. None: the parameter starts anew.
  virtual void write(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                     const optim::State& values) const = 0;
};

/// Throws a NotImplementedError in the name of `function` if it is not known.
std::unique_ptr<OptimizerKind> kind_of(const torch::optim::Optimizer& optimizer,
                                       const char* function);

}  // namespace tessera::state
