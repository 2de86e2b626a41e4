#pragma once

#include "base/capture.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tessera::compiler {

/// On what a recording depends: it holds while `read` returns `expected`.
struct Dependency {
  const void* who;
  std::string what;
  std::function<uint64_t()> read;
  uint64_t expected;
  bool is_of_module = false;
};

/// See capture::Observer::before_run.
struct FirstAction {
  const void* who;
  std::function<void()> act;
};

/// See capture::Observer::hyperparameter.
struct Hyperparameter {
  const void* who;
  std::string name;
  std::shared_ptr<capture::HostNumber> number;
  std::function<double()> read;
  double value;  // that it read
};

}  // namespace tessera::compiler
