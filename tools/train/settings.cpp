#include "train/settings.h"

#include "train/run_paths.h"
#include "unknown_words.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <stdexcept>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMost = int64_t{1} << 30;

std::string list(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

/// A word of the list; of another one the nearest is told.
CLI::Validator one_of(const std::vector<std::string>& words) {
  const auto check = [words](std::string& text) -> std::string {
    if (std::ranges::count(words, text) > 0) return {};
    const auto meant = tool::nearest_word(text, words);
    return "expected one of " + list(words) + ", got '" + text + "'" +
           (meant.empty() ? "" : "; did you mean " + meant + "?");
  };
  return {check, list(words)};
}

template <class T>
CLI::Validator between(T least, T most) {
  const auto check = [=](std::string& text) -> std::string {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most)
      return {};
    const bool is_number = error == std::errc() && end == text.data() + text.size();
    std::ostringstream message;
    message << "expected a number from " << least << " to " << most << ", got '" << text << "'";
    if (is_number) message << "; the nearest is " << (value > most ? most : least);
    return message.str();
  };
  return {check, ""};
}

CLI::Validator mesh_text() {
  const auto check = [](std::string& text) -> std::string {
    try {
      parse_mesh(text);
      return {};
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  return {check, "NAME=N,..."};
}

/// An option that takes a number.
template <class T>
void add_number(CLI::App& app, const char* group, const char* name, T& value, T least, T most,
                const char* help) {
  app.add_option(name, value, help)
      ->capture_default_str()
      ->check(between<T>(least, most))
      ->group(group);
}

void add_data(CLI::App& app, Settings& settings) {
  app.add_option("--data", settings.data, "Files, and folders whose text files are read")
      ->capture_default_str()
      ->take_all()
      ->group("Data");
  app.add_option("--tokenizer", settings.tokenizer,
                 "'bytes', or a tokenizer.json with byte-level BPE")
      ->capture_default_str()
      ->group("Data");
  add_number(app, "Data", "--validation", settings.validation, 0.0, 0.9,
             "Part of the text that is never trained on");
}

void add_model(CLI::App& app, Settings& settings) {
  const auto add = [&](const char* name, int64_t& value, const char* help) {
    add_number<int64_t>(app, "Model", name, value, 1, 1 << 24, help);
  };
  add("--blocks", settings.blocks, "Transformer blocks");
  add("--width", settings.width, "Width of a token's vector, a multiple of --heads");
  add("--heads", settings.heads, "Attention heads");
  add("--context", settings.context, "Tokens of a sequence");
  add_number(app, "Model", "--dropout", settings.dropout, 0.0, 0.99,
             "Of what blocks add to the residual stream");
}

void add_training(CLI::App& app, Settings& settings) {
  const auto count = [&](const char* name, int64_t& value, int64_t least, const char* help) {
    add_number<int64_t>(app, "Training", name, value, least, kMost, help);
  };
  const auto number = [&](const char* name, double& value, double most, const char* help) {
    add_number(app, "Training", name, value, 0.0, most, help);
  };
  count("--steps", settings.steps, 1, "Steps of the optimizer");
  count("--batch", settings.batch, 1, "Sequences per step, of all ranks together");
  count("--accumulate", settings.accumulate, 1, "Parts of a batch that are computed in turn");
  count("--warmup", settings.warmup, 0, "Steps until the learning rate is reached");
  number("--lr", settings.lr, 1e30, "Learning rate after the warm-up");
  number("--min-lr", settings.min_lr, 1e30, "Learning rate at the end of the cosine");
  number("--weight-decay", settings.weight_decay, 1e6, "Of matrices; vectors have none");
  number("--beta1", settings.beta1, 0.999999, "Of AdamW");
  number("--beta2", settings.beta2, 0.999999, "Of AdamW");
  number("--clip", settings.clip, 1e30, "Largest norm of the gradient; 0: any");
  add_number<uint64_t>(app, "Training", "--seed", settings.seed, 0, kMost,
                       "Of weights, order of data, dropout and samples");
}

void add_parallelism(CLI::App& app, Settings& settings) {
  const auto choice = [&](const char* name, std::string& value, std::vector<std::string> words,
                          const char* help) {
    app.add_option(name, value, help)
        ->capture_default_str()
        ->check(one_of(words))
        ->group("Parallelism");
  };
  add_number(app, "Parallelism", "--ranks", settings.ranks, 1, 4096,
             "Ranks to start here, unless a launcher already has");
  app.add_option("--mesh", settings.mesh,
                 "Ranks per dimension: replicas, dp and tp, e.g. dp=2,tp=2; empty: all along dp")
      ->capture_default_str()
      ->check(mesh_text())
      ->group("Parallelism");
  choice("--parallel", settings.parallel, {"replicate", "fully_shard", "hybrid"},
         "What ranks along dp keep: copies, shards, or (hybrid) copies of shards");
  app.add_flag("--compile,!--no-compile", settings.compile,
               "Run the step as a compiled program [off]")
      ->group("Parallelism");
  choice("--checkpoint-activations", settings.checkpoint_activations,
         {"none", "block", "selective"},
         "What backward computes again: nothing, blocks, or all but matrix products");
  choice("--precision", settings.precision, {"fp32", "bf16", "fp16"}, "Of computation");
  choice("--comm-hook", settings.comm_hook, {"none", "fp16", "bf16", "powersgd"},
         "How gradients travel (replicate)");
  choice("--device", settings.device, {"cpu", "cuda"}, "Where it is computed");
}

void add_keeping(CLI::App& app, Settings& settings) {
  const auto every = [&](const char* name, int64_t& value, const char* help) {
    add_number<int64_t>(app, "Run", name, value, 0, kMost, help);
  };
  app.add_option("--run", settings.run, "Folder of the run; empty: a new one under runs/")
      ->capture_default_str()
      ->group("Run");
  app.add_flag("--resume", settings.resume,
               "Go on from the last checkpoint of --run, or of the newest run [off]")
      ->configurable(false)
      ->group("Run");
  every("--save-every", settings.save_every, "Steps between checkpoints; 0: at the end alone");
  every("--keep-last", settings.keep_last, "Checkpoints that are kept; 0: all");
  every("--eval-every", settings.eval_every, "Steps between validations; 0: at the end alone");
  every("--log-every", settings.log_every, "Steps between lines where there is no terminal");
  add_number(app, "Run", "--trace", settings.trace, 0, 1000,
             "Steps, after the fifth, that go into trace.json");
  every("--sample", settings.sample, "Tokens of text written at the end");
  app.add_option("--prompt", settings.prompt, "What that text begins with")
      ->capture_default_str()
      ->group("Run");
  app.add_flag("--skip-nonfinite,!--no-skip-nonfinite", settings.skip_nonfinite,
               "Leave steps out whose loss or gradient is not finite, instead of stopping [off]")
      ->group("Run");
  add_number(app, "Run", "--max-restarts", settings.max_restarts, 0, 1'000'000,
             "Go on from the last checkpoint after so many failures");
}

/// The value of an option among words that nobody has parsed yet; empty if it is not there.
std::string value_among(const std::vector<std::string>& arguments, const std::string& option) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == option && i + 1 < arguments.size()) return arguments[i + 1];
    if (arguments[i].starts_with(option + "=")) return arguments[i].substr(option.size() + 1);
  }
  return {};
}

[[noreturn]] void refuse(const std::string& message) { throw CLI::ValidationError(message); }

/// CLI11 tells of a key that it does not know in words of its own.
[[noreturn]] void refuse_key(const CLI::App& app, const CLI::ConfigError& error) {
  const std::string text = error.what();
  const auto key = text.substr(text.rfind(' ') + 1);
  std::vector<std::string> known;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) known.push_back(name);
  }
  const auto meant = tool::nearest_word(key, known);
  refuse("--config: expected names of flags, got '" + key + "'" +
         (meant.empty() ? "; see --help" : "; did you mean " + meant + "?"));
}

}  // namespace

std::vector<MeshDim> parse_mesh(const std::string& text) {
  const std::vector<std::string> known = {"replicas", "dp", "tp"};
  std::vector<MeshDim> dims;
  if (text.empty()) return dims;
  for (const auto& part : CLI::detail::split(text, ',')) {
    const auto equals = part.find('=');
    const auto name = part.substr(0, equals);
    int64_t size = 0;
    if (equals != std::string::npos) {
      const auto* end = part.data() + part.size();
      if (std::from_chars(part.data() + equals + 1, end, size).ptr != end) size = 0;
    }
    const auto meant = tool::nearest_word(name, known);
    const auto at = std::ranges::find(known, name) - known.begin();
    if (at == std::ssize(known) || size < 1) {
      throw std::invalid_argument(
          "expected NAME=RANKS of replicas, dp and tp, e.g. dp=2,tp=2, got '" + part + "'" +
          (meant.empty() || meant == name ? "" : "; did you mean " + meant + "?"));
    }
    const bool in_order =
        dims.empty() || std::ranges::find(known, dims.back().first) - known.begin() < at;
    if (!in_order) {
      throw std::invalid_argument("expected replicas, dp and tp once each, in this order, got '" +
                                  text + "'");
    }
    dims.emplace_back(name, size);
  }
  return dims;
}

void add_settings(CLI::App& app, Settings& settings) {
  app.set_config("--config", "", "A TOML file with any of these settings, by the same names")
      ->group("Data");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.option_defaults()->take_last();  // given twice, the later word counts
  add_data(app, settings);
  add_model(app, settings);
  add_training(app, settings);
  add_parallelism(app, settings);
  add_keeping(app, settings);
}

void parse_settings(CLI::App& app, Settings& settings, std::vector<std::string> arguments) {
  tool::refuse_unknown_options(app, arguments);
  if (std::ranges::count(arguments, "--resume") > 0) {
    auto run = value_among(arguments, "--run");
    if (run.empty()) run = newest_run();
    if (run.empty())
      refuse("--resume: expected a run under runs/, found none; name one with --run");
    if (!fs::exists(fs::path(run) / "config.toml"))
      refuse("--resume: expected a run in '" + run + "', found no config.toml there");
    if (value_among(arguments, "--run").empty()) {
      arguments.push_back("--run");
      arguments.push_back(run);
    }
    if (value_among(arguments, "--config").empty()) {
      arguments.push_back("--config");
      arguments.push_back((fs::path(run) / "config.toml").string());
    }
  }
  std::ranges::reverse(arguments);  // as CLI11 takes them
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ConfigError& error) {
    refuse_key(app, error);
  }
  if (settings.width % settings.heads != 0)
    refuse("--width: expected a multiple of --heads " + std::to_string(settings.heads) + ", got " +
           std::to_string(settings.width) + "; the nearest is " +
           std::to_string(std::max<int64_t>(1, settings.width / settings.heads) * settings.heads));
}

std::string to_toml(const CLI::App& app) { return app.config_to_str(/*default_also=*/true); }

std::map<std::string, std::string> to_map(const CLI::App& app) {
  std::map<std::string, std::string> values;
  for (const auto* option : app.get_options()) {
    if (!option->get_configurable() || option->get_lnames().empty()) continue;
    const auto& name = option->get_lnames().front();
    if (name == "help" || name == "config" || name == "run") continue;
    std::string value;
    for (const auto& word : option->results()) value += (value.empty() ? "" : " ") + word;
    values[name] = option->count() > 0 ? value : option->get_default_str();
  }
  return values;
}

void check(const Settings& settings, int world_size) {
  const auto dims = parse_mesh(settings.mesh);
  std::map<std::string, int64_t> sizes;
  int64_t ranks = 1;
  for (const auto& [name, size] : dims) {
    sizes[name] = size;
    ranks *= size;
  }
  if (dims.empty()) sizes["dp"] = ranks = world_size;
  if (ranks != world_size)
    refuse("--mesh: expected " + std::to_string(world_size) + " ranks, got '" + settings.mesh +
           "', which has " + std::to_string(ranks));
  const bool has_data = sizes.contains("dp"), is_hybrid = settings.parallel == "hybrid";
  if (is_hybrid && !(has_data && sizes.contains("replicas")))
    refuse("--parallel hybrid: expected --mesh replicas=R,dp=D, got '" + settings.mesh + "'");
  if (!is_hybrid && sizes.contains("replicas"))
    refuse("--mesh: expected replicas with --parallel hybrid alone, got --parallel " +
           settings.parallel);
  if (settings.parallel != "replicate" && !has_data)
    refuse("--parallel " + settings.parallel + ": expected dp in --mesh, got '" + settings.mesh +
           "'");
  if (settings.comm_hook != "none" && (settings.parallel != "replicate" || !has_data))
    refuse("--comm-hook: expected --parallel replicate and ranks along dp, got --parallel " +
           settings.parallel + " and --mesh '" + settings.mesh + "'");
  const auto tp = sizes.contains("tp") ? sizes["tp"] : 1;
  if (settings.heads % tp != 0)
    refuse("--mesh: expected tp to divide --heads " + std::to_string(settings.heads) +
           ", got tp=" + std::to_string(tp));
  const auto data_ranks = ranks / tp, parts = data_ranks * settings.accumulate;
  if (settings.batch % parts != 0)
    refuse("--batch: expected a multiple of " + std::to_string(parts) + " (ranks along the batch " +
           std::to_string(data_ranks) + " x --accumulate " + std::to_string(settings.accumulate) +
           "), got " + std::to_string(settings.batch) + "; the nearest is " +
           std::to_string((settings.batch + parts - 1) / parts * parts));
}

}  // namespace tessera::train
