#pragma once

#include <CLI/CLI.hpp>
#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

namespace tessera::benchmarks {

struct TrainOptions {
  std::string device = "cpu";
  std::vector<std::string> jobs;   // none: all of the device
  std::vector<std::string> modes;  // none: all that are not compiled
  std::vector<std::string> peers;  // none: PyTorch in its variants for the device
  int pairs = 15;                  // on a GPU 7, unless given
  int steps = 0;                   // per timed block; 0: by the job
  std::string csv;
  bool kernels = false;
  bool list = false;

  c10::DeviceType device_type() const;
};

/// Defines `tessera bench train`'s command line; parsing fills `options`.
void add_train_options(CLI::App& app, TrainOptions& options);

/// Of each device its jobs, modes and peers, one line each.
std::string list_choices();

}  // namespace tessera::benchmarks
