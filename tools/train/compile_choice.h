#pragma once

#include "train/settings.h"

#include <string>

namespace tessera::train {

/// Whether the step is compiled.
struct CompileChoice {
  bool is_on = false;
  std::string why_not = {};  // of a run that leaves it open; empty if it is compiled or was told
};

/// What the settings say. Left open: on for what is measured to be faster compiled and is tested
/// on a device, see Note [compiled by default]. Every rank chooses alike.
CompileChoice choose_compile(const Settings& settings, int world_size);

}  // namespace tessera::train
