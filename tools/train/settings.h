#pragma once

#include "train/settings.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

/// What `tessera train` can be told, by flags or by a TOML file with the same names.
namespace tessera::train {

/// Exit codes of ranks after which another start would end alike.
constexpr int kWrongSettings = 2;
constexpr int kAgreedFailure = 3;  // found on all ranks: a loss that is not finite, other texts
constexpr int kNotSaved = 4;       // a checkpoint that was due or asked for by a signal

struct Settings {
  // What is read
  std::string config;  // a file with settings
  std::vector<std::string> data = {"."};
  std::vector<std::string> sft;  // conversations, in place of data
  std::string chat_format = "auto";
  std::string tokenizer = "auto";
  double validation = 0.05;                  // of the text, its end
  std::vector<std::string> validation_data;  // in its place: texts of their own
  // The model. Sizes of 0 are those of --preset or --from, or follow from the others.
  std::string model = "auto";
  std::string preset, from;
  int64_t blocks = 4, width = 128, heads = 4, context = 128;
  int64_t kv_heads = 0, feed_forward = 0, vocabulary = 0;
  std::optional<bool> tie_head;  // none: as the kind of model has it
  double dropout = 0;
  // Adapters
  int64_t lora = 0;                         // rank; 0: none
  double lora_alpha = 0, lora_dropout = 0;  // alpha 0: twice the rank
  std::vector<std::string> lora_targets;    // none: the linear layers of blocks
  // Training
  int64_t steps = 1500, batch = 16, accumulate = 1, warmup = 40;
  double minutes = 0;  // 0: however long the steps take
  double lr = 3e-3, min_lr = 1e-4, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, clip = 1.0;
  double ema = 0;  // what a step leaves of the averages of weights; 0: there are none
  std::string optimizer = "adamw";
  uint64_t seed = 1;
  // How
  int ranks = 2;
  std::string mesh;  // "dp=2,tp=2"; empty: all ranks along dp
  std::string parallel = "replicate";
  std::string pipeline_schedule = "1f1b";
  int64_t microbatches = 8;
  std::optional<bool> compile;  // none: where it is known to be faster
  std::string checkpoint_activations = "none";
  std::string precision = "fp32";
  std::string optimizer_state = "fp32";
  std::string attention = "auto";
  std::string comm_hook = "none";
  std::string device = "cpu";
  double timeout = 300;  // seconds that a rank waits for others
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

/// A setting that a file may hold: its flag, and where its value is.
struct Field {
  CLI::Option* option;
  std::variant<int*, int64_t*, uint64_t*, double*, bool*, std::optional<bool>*, std::string*,
               std::vector<std::string>*>
      value;
  const std::string& name() const { return option->get_lnames().front(); }
};
using Fields = std::vector<Field>;

/// Adds an option for each setting; --help tells defaults. `settings` outlives what is returned.
Fields add_settings(CLI::App& app, Settings& settings);

/// Parses the words behind `tessera train`, then the file of --config for what they do not say.
/// Throws CLI::Error: of help asked for, of a word that nobody knows, with the nearest that is
/// known. With --resume the settings of the run itself count where none are given.
void parse_settings(CLI::App& app, const Fields& fields, Settings& settings,
                    std::vector<std::string> arguments);

/// All settings by name, but for the run's folder.
std::map<std::string, std::string> to_map(const Fields& fields);

/// What contradicts itself beyond single values, e.g. ranks and mesh. Throws CLI::ValidationError.
void check(const Settings& settings, int world_size);
/// Whether this host has memory for what the model and a batch take at the very least, with
/// `ranks_here` of the ranks on it. Throws the same. Of a model whose sizes are not known yet
/// nothing is said.
void check_memory(const Settings& settings, int world_size, int ranks_here);
/// Whether what is to be read is there and the run's folder can be one. Throws the same.
void check_paths(const Settings& settings);

/// Whether the step is compiled.
struct CompileChoice {
  bool is_on = false;
  std::string why_not = {};  // of a run that leaves it open; empty if it is compiled or was told
};

/// What the settings say. Left open: on for what is measured to be faster compiled and is tested
/// on a device, see Note [compiled by default]. Every rank chooses alike.
CompileChoice choose_compile(const Settings& settings, int world_size);

}  // namespace tessera::train
