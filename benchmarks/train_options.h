#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace tessera::benchmarks {

struct TrainOptions {
  std::vector<std::string> jobs;
  std::vector<std::string> modes;
  std::vector<std::string> peers = {"pytorch", "pytorch_malloc"};
  int pairs = 15;
  int steps = 0;  // per timed block; 0: by the job
  std::string csv;
  bool list = false;

  TrainOptions();  // all jobs, all modes that are not compiled
};

/// Defines `tessera bench train`'s command line; parsing fills `options`.
void add_train_options(CLI::App& app, TrainOptions& options);

/// Jobs, modes and peers, one line each.
std::string list_choices();

}  // namespace tessera::benchmarks
