#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// What `tessera train` can be told, by flags or by a TOML file with the same names.
namespace tessera::train {

struct Settings {
  // What is read
  std::vector<std::string> data = {"."};
  std::string tokenizer = "bytes";
  double validation = 0.05;  // of the text, its end
  // The model
  int64_t blocks = 6, width = 256, heads = 4, context = 128;
  double dropout = 0;
  // Training
  int64_t steps = 400, batch = 8, accumulate = 1, warmup = 40;
  double lr = 1e-3, min_lr = 1e-4, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, clip = 1.0;
  uint64_t seed = 1;
  // How
  int ranks = 2;
  std::string mesh;  // "dp=2,tp=2"; empty: all ranks along dp
  std::string parallel = "replicate";
  bool compile = false;
  std::string checkpoint_activations = "none";
  std::string precision = "fp32";
  std::string comm_hook = "none";
  std::string device = "cpu";
  bool skip_nonfinite = false;
  // What is kept and shown
  std::string run;  // empty: a new folder under runs/
  bool resume = false;
  int64_t save_every = 100, keep_last = 2, eval_every = 100, log_every = 10;
  int trace = 0;
  int64_t sample = 200;
  std::string prompt = "The ";
  int max_restarts = 0;
};

/// One dimension of a mesh, e.g. {"dp", 2}.
using MeshDim = std::pair<std::string, int64_t>;
/// Throws std::invalid_argument that says what was expected.
std::vector<MeshDim> parse_mesh(const std::string& text);

/// Adds an option for each setting; --help tells defaults.
void add_settings(CLI::App& app, Settings& settings);

/// Parses the words behind `tessera train`. Throws CLI::Error: of help asked for, of a word that
/// nobody knows, with the nearest that is known. With --resume the settings of the run itself count
/// where none are given.
void parse_settings(CLI::App& app, Settings& settings, std::vector<std::string> arguments);

/// All settings as a TOML file that --config takes; and by name, but for the run's folder.
std::string to_toml(const CLI::App& app);
std::map<std::string, std::string> to_map(const CLI::App& app);

/// What contradicts itself beyond single values, e.g. ranks and mesh. Throws CLI::ValidationError.
void check(const Settings& settings, int world_size);

}  // namespace tessera::train
