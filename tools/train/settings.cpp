#include "train/settings.h"

#include "command_line.h"
#include "numbers.h"
#include "train/run_paths.h"
#include "train/settings_file.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMost = int64_t{1} << 30;
constexpr double kMostDecay = 0.9999999;
constexpr int64_t kStepsPerWarmup = 10;  // of a warm-up that is not given

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

/// The command line, and the settings that a file may hold as well.
struct Flags {
  CLI::App& app;
  const char* group;
  Fields& fields;

  template <class T>
  CLI::Option* add(const char* name, T& value, const char* help) const {
    auto* option = app.add_option(name, value, help)->capture_default_str()->group(group);
    fields.push_back({option, &value});
    return option;
  }
  /// Empty unless given.
  void add_list(const char* name, std::vector<std::string>& value, const char* help) const {
    fields.push_back({app.add_option(name, value, help)->take_all()->group(group), &value});
  }
  template <class T>
  void add_number(const char* name, T& value, T least, T most, const char* help) const {
    auto* option = tool::add_number(app, name, value, least, most, help)->group(group);
    fields.push_back({option, &value});
  }
  void add_switch(const char* name, bool& value, const char* help) const {
    fields.push_back({app.add_flag(name, value, help)->group(group), &value});
  }
  /// By a function: CLI11 takes an optional for a counter and begins at 0.
  void add_switch(const char* name, std::optional<bool>& value, const char* help) const {
    auto* option =
        app.add_flag_function(name, [&value](int64_t count) { value = count > 0; }, help);
    fields.push_back({option->take_last()->group(group), &value});
  }
};

void add_data(const Flags& flags, Settings& settings) {
  flags.app
      .add_option("--config", settings.config,
                  "A TOML file with any of these settings, by the same names")
      ->group(flags.group);
  flags
      .add("--data", settings.data,
           "Files, and folders whose text files are read; or folders of tessera tokenize")
      ->take_all();
  flags.add_list("--sft", settings.sft,
                 "Files with one conversation per line, as JSON, in place of --data: answers are "
                 "learned");
  flags
      .add("--chat-format", settings.chat_format,
           "How conversations are written; auto: as the tokenizer's special tokens say")
      ->check(one_of({"auto", "chatml", "llama3", "plain"}));
  flags.add("--tokenizer", settings.tokenizer,
            "'bytes', or a tokenizer.json with byte-level BPE; auto: that of --from or of token "
            "shards, else bytes");
  flags.add_number("--validation", settings.validation, 0.0, 0.9,
                   "Part of the text that is never trained on");
  flags
      .add("--validation-data", settings.validation_data,
           "Files and folders to validate on, in place of --validation")
      ->take_all();
}

void add_model(const Flags& flags, Settings& settings) {
  const auto add = [&](const char* name, int64_t& value, int64_t most, const char* help) {
    flags.add_number<int64_t>(name, value, 0, most, help);
  };
  flags
      .add("--model", settings.model,
           "Kind of model; auto: that of --preset or --from, else gpt, which is this library's own")
      ->check(one_of({"auto", "gpt", "gpt2", "llama", "qwen2", "qwen3"}));
  flags.add("--preset", settings.preset, "Sizes of a published model, e.g. qwen2.5-0.5b");
  flags.add("--from", settings.from,
            "A Hugging Face folder: the model of its config.json, its weights and tokenizer");
  add("--blocks", settings.blocks, 1 << 16, "Transformer blocks");
  add("--width", settings.width, 1 << 24, "Width of a token's vector, a multiple of --heads");
  add("--heads", settings.heads, 1 << 24, "Attention heads");
  add("--kv-heads", settings.kv_heads, 1 << 24,
      "Heads of keys and values (llama, qwen2, qwen3); 0: as many as --heads");
  add("--feed-forward", settings.feed_forward, 1 << 24,
      "Width inside of the feed-forward part; 0: 4 times --width, with SwiGLU 8/3");
  add("--vocabulary", settings.vocabulary, 1 << 24,
      "Rows of the embedding; 0: those of --preset or --from, else the tokenizer's");
  flags.add_switch("--tie-head,!--no-tie-head", settings.tie_head,
                   "The head has the embedding's weights [as the kind of model has it]");
  add("--context", settings.context, 1 << 24, "Tokens of a sequence");
  flags.add_number("--dropout", settings.dropout, 0.0, 0.99,
                   "Of what blocks add to the residual stream (gpt, gpt2)");
  add("--lora", settings.lora, 1 << 16,
      "Rank of adapters, which alone are trained; 0: the whole model is");
  flags.add_number("--lora-alpha", settings.lora_alpha, 0.0, 1e6,
                   "What adapters give is multiplied by it / --lora; 0: twice --lora");
  flags.add_number("--lora-dropout", settings.lora_dropout, 0.0, 0.99,
                   "Of what goes into adapters");
  flags.add_list("--lora-targets", settings.lora_targets,
                 "Linear layers that get them, e.g. q_proj v_proj; not given: all in blocks");
}

void add_training(const Flags& flags, Settings& settings) {
  const auto count = [&](const char* name, int64_t& value, int64_t least, const char* help) {
    flags.add_number<int64_t>(name, value, least, kMost, help);
  };
  const auto number = [&](const char* name, double& value, double most, const char* help) {
    flags.add_number(name, value, 0.0, most, help);
  };
  count("--steps", settings.steps, 1, "Steps of the optimizer");
  number("--minutes", settings.minutes, 1e6,
         "Time after which a run ends even if --steps are not done; 0: none");
  count("--batch", settings.batch, 1, "Sequences per step, of all ranks together");
  count("--accumulate", settings.accumulate, 1, "Parts of a batch that are computed in turn");
  count("--warmup", settings.warmup, 0,
        "Steps until the learning rate is reached; not given: at most a tenth of --steps");
  number("--lr", settings.lr, 1e30, "Learning rate after the warm-up");
  number("--min-lr", settings.min_lr, 1e30,
         "Learning rate at the end of the cosine; not given: at most --lr");
  number("--weight-decay", settings.weight_decay, 1e6, "Of matrices; vectors have none");
  flags
      .add("--optimizer", settings.optimizer,
           "Of the matrices in blocks; what is beside them is AdamW's")
      ->check(one_of({"adamw", "muon"}));
  number("--beta1", settings.beta1, 0.999999, "Of AdamW");
  number("--beta2", settings.beta2, 0.999999, "Of AdamW");
  number("--clip", settings.clip, 1e30, "Largest norm of the gradient; 0: any");
  number(
      "--ema", settings.ema, kMostDecay,
      "Averages of the weights are kept, validated and sampled: what a step leaves of them, e.g. "
      "0.999; 0: none");
  flags.add_number<uint64_t>("--seed", settings.seed, 0, kMost,
                             "Of weights, order of data, dropout and samples");
}

void add_parallelism(const Flags& flags, Settings& settings) {
  const auto choice = [&](const char* name, std::string& value, std::vector<std::string> words,
                          const char* help) { flags.add(name, value, help)->check(one_of(words)); };
  flags.add_number("--ranks", settings.ranks, 1, 4096,
                   "Ranks to start here, unless a launcher already has");
  flags
      .add("--mesh", settings.mesh,
           "Ranks per dimension: pp (stages), replicas, dp, cp (parts of sequences) and tp, e.g. "
           "dp=2,tp=2; "
           "empty: all along dp")
      ->check(mesh_text());
  choice("--parallel", settings.parallel, {"replicate", "fully_shard", "hybrid"},
         "What ranks along dp keep: copies, shards, or (hybrid) copies of shards");
  choice("--pipeline-schedule", settings.pipeline_schedule,
         {"gpipe", "1f1b", "interleaved", "zero-bubble", "zbv-zero-bubble"},
         "Which stage does what when, with pp in --mesh");
  flags.add_number<int64_t>("--microbatches", settings.microbatches, 1, 1 << 16,
                            "Parts of a batch that flow through the stages, with pp in --mesh");
  flags.add_switch(
      "--compile,!--no-compile", settings.compile,
      "Run the step as a compiled program [where it is known to be faster; a line says "
      "why not]");
  choice("--checkpoint-activations", settings.checkpoint_activations,
         {"none", "block", "selective"},
         "What backward computes again: nothing, blocks, or all but matrix products");
  choice("--precision", settings.precision, {"fp32", "bf16", "fp16"}, "Of computation");
  choice("--optimizer-state", settings.optimizer_state, {"fp32", "bf16", "int8"},
         "What AdamW keeps of each parameter: two numbers of 4, of 2 or of 1 byte");
  choice("--attention", settings.attention, {"auto", "cudnn", "flash", "math"},
         "Kernel that is asked first on a GPU; auto: cuDNN's with bf16 and fp16");
  choice("--comm-hook", settings.comm_hook, {"none", "fp16", "bf16", "powersgd"},
         "How gradients travel (replicate)");
  choice("--device", settings.device, {"cpu", "cuda"}, "Where it is computed");
  flags.add_number("--timeout", settings.timeout, 1.0, 1e6,
                   "Seconds that a rank waits for others before it names them and ends");
}

void add_keeping(const Flags& flags, Settings& settings) {
  const auto every = [&](const char* name, int64_t& value, const char* help) {
    flags.add_number<int64_t>(name, value, 0, kMost, help);
  };
  flags.add("--run", settings.run, "Folder of the run; empty: a new one under runs/");
  flags.app
      .add_flag("--resume", settings.resume,
                "Go on from the last checkpoint of --run, or of the newest run [off]")
      ->group(flags.group);
  every("--save-every", settings.save_every, "Steps between checkpoints; 0: at the end alone");
  every("--keep-last", settings.keep_last, "Checkpoints that are kept; 0: all");
  every("--eval-every", settings.eval_every, "Steps between validations; 0: at the end alone");
  every("--log-every", settings.log_every, "Steps between lines where there is no terminal");
  flags.add_number("--trace", settings.trace, 0, 1000,
                   "Steps, after the fifth where there are so many, that go into trace.json; on a "
                   "GPU with its kernels, which the timeline then has as well");
  flags.add_number<int64_t>("--sample", settings.sample, 0, 1 << 20,
                            "Tokens of text written at the end");
  flags.add("--prompt", settings.prompt, "What that text begins with");
  flags.add_switch(
      "--skip-nonfinite,!--no-skip-nonfinite", settings.skip_nonfinite,
      "Leave steps out whose loss or gradient is not finite, instead of stopping [off]");
  flags.add_number("--max-restarts", settings.max_restarts, 0, 1'000'000,
                   "Go on from the last checkpoint after so many failures");
}

[[noreturn]] void refuse(const std::string& message) { throw CLI::ValidationError(message); }

/// Of --resume: the run, and its own settings unless a file is given.
void find_run(Settings& settings) {
  if (settings.run.empty()) settings.run = newest_run();
  if (settings.run.empty())
    refuse("--resume: expected a run under runs/, found none; name one with --run");
  const auto config = fs::path(settings.run) / "config.toml";
  if (!fs::exists(config))
    refuse("--resume: expected a run in '" + settings.run + "', found no config.toml there");
  if (settings.config.empty()) settings.config = config.string();
}

std::string text_of(const std::string& value) { return value; }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(std::optional<bool> value) { return value ? text_of(*value) : "auto"; }
std::string text_of(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}
template <class T>
std::string text_of(T number) {
  return tool::number_text(number);
}

constexpr double kLearningRateOfPreset = 3e-4;
constexpr double kLearningRateOfTuning = 2e-5;
constexpr double kLearningRateOfAdapters = 2e-4;
constexpr double kFall = 0.1;  // from the first to the last learning rate

/// A published model has sizes of its own, and is trained by smaller steps.
void fit_model(const CLI::App& app, Settings& settings) {
  const bool is_tuned = !settings.from.empty();
  if (settings.preset.empty() && !is_tuned) return;
  if (!settings.preset.empty() && is_tuned)
    refuse("--preset: expected it without --from, whose config.json has the sizes, got " +
           settings.preset + " and " + settings.from);
  const std::pair<const char*, int64_t*> sizes[] = {{"--blocks", &settings.blocks},
                                                    {"--width", &settings.width},
                                                    {"--heads", &settings.heads},
                                                    {"--context", &settings.context}};
  for (const auto& [flag, size] : sizes) {
    if (app.count(flag) == 0) *size = 0;
  }
  if (app.count("--lr") == 0)
    settings.lr = settings.lora > 0 ? kLearningRateOfAdapters
                  : is_tuned        ? kLearningRateOfTuning
                                    : kLearningRateOfPreset;
  if (app.count("--min-lr") == 0) settings.min_lr = kFall * settings.lr;
}

void check_sizes(const Settings& settings) {
  if (!settings.preset.empty() || !settings.from.empty()) return;  // checked with the model's own
  const std::pair<const char*, int64_t> sizes[] = {{"--blocks", settings.blocks},
                                                   {"--width", settings.width},
                                                   {"--heads", settings.heads},
                                                   {"--context", settings.context}};
  for (const auto& [flag, size] : sizes) {
    if (size == 0)
      refuse(std::string(flag) +
             ": expected at least 1, got 0, which means that of --preset or --from");
  }
  if (settings.width % settings.heads != 0)
    refuse("--width: expected a multiple of --heads " + std::to_string(settings.heads) + ", got " +
           std::to_string(settings.width) + "; the nearest is " +
           std::to_string(std::max<int64_t>(1, settings.width / settings.heads) * settings.heads));
}

/// Defaults that have to fit what is given. A warm-up that a run began with stays, even if
/// --resume is given fewer --steps.
void fit_schedule(const CLI::App& app, Settings& settings, bool is_own_warmup) {
  if (app.count("--warmup") == 0)
    settings.warmup = std::min(settings.warmup, settings.steps / kStepsPerWarmup);
  if (app.count("--min-lr") == 0) settings.min_lr = std::min(settings.min_lr, settings.lr);
  if (is_own_warmup && settings.warmup > settings.steps)
    refuse("--warmup: expected at most --steps " + std::to_string(settings.steps) + ", got " +
           std::to_string(settings.warmup) + "; without --warmup it is a tenth of the steps");
  if (settings.min_lr > settings.lr)
    refuse("--min-lr: expected at most --lr " + text_of(settings.lr) + ", got " +
           text_of(settings.min_lr) + "; the learning rate falls from --lr to --min-lr");
}

}  // namespace

Fields add_settings(CLI::App& app, Settings& settings) {
  app.option_defaults()->take_last();  // given twice, the later word counts
  Fields fields;
  add_data({app, "Data", fields}, settings);
  add_model({app, "Model", fields}, settings);
  add_training({app, "Training", fields}, settings);
  add_parallelism({app, "Parallelism", fields}, settings);
  add_keeping({app, "Run", fields}, settings);
  return fields;
}

void parse_settings(CLI::App& app, const Fields& fields, Settings& settings,
                    std::vector<std::string> arguments) {
  tool::refuse_unknown_options(app, arguments);
  std::ranges::reverse(arguments);  // as CLI11 takes them
  app.parse(std::move(arguments));
  if (settings.resume) find_run(settings);
  const bool has_warmup_flag = app.count("--warmup") > 0;
  const auto run = settings.run;
  if (!settings.config.empty()) read_settings(settings.config, fields);
  if (settings.resume) settings.run = run;  // a file may name the folder of another one
  check_text(fields);
  fit_model(app, settings);
  fit_schedule(app, settings, /*is_own_warmup=*/has_warmup_flag || !settings.resume);
  check_sizes(settings);
}

std::map<std::string, std::string> to_map(const Fields& fields) {
  std::map<std::string, std::string> values;
  for (const auto& field : fields) {
    if (field.name() == "run") continue;
    values[field.name()] =
        std::visit([](const auto* value) { return text_of(*value); }, field.value);
  }
  return values;
}

namespace {

// Note [compiled by default]
// Measured on one GPU, a compiled step takes 0.78 to 0.85 of the time of an eager one (GPT of 12
// blocks), and an eighth of it where launches are what takes time (GPT of 6 blocks): rows `compile`
// of benchmarks/results/*-train-cuda-compile-gpt*-1rank.csv. On a CPU the intervals of a GPT's rows
// have 1 in them. Programs that communicate are not replayed as CUDA graphs, and no row tells of
// them. Whatever else is not both measured and tested on a device stays eager, too.

/// Compiling takes seconds, of which a step saves some milliseconds.
constexpr int64_t kFewestSteps = 500;

std::string why_eager(const Settings& settings, int world_size) {
  if (settings.device != "cuda") return "steps of a GPT are not measured to be faster so on a CPU";
  if (world_size > 1) return "steps of several ranks are not measured to be faster so on GPUs";
  if (settings.precision == "fp16") return "with fp16 the host reads values of each step";
  if (settings.steps < kFewestSteps)
    return "compiling takes longer than fewer than " + std::to_string(kFewestSteps) + " steps save";
  const auto mesh = parse_mesh(settings.mesh);
  const auto is_cut = [](const MeshDim& dim) { return dim.first == "pp" || dim.first == "cp"; };
  const std::pair<bool, const char*> untested[] = {
      {std::ranges::any_of(mesh, is_cut), "pp or cp in --mesh"},
      {settings.model != "auto" && settings.model != "gpt" && settings.model != "gpt2",
       "--model, --preset or --from"},
      {settings.optimizer != "adamw", "--optimizer muon"},
      {settings.optimizer_state != "fp32", "--optimizer-state"},
      {settings.dropout > 0, "--dropout"},
      {settings.lora > 0, "--lora"},
      {!settings.sft.empty(), "--sft"},
      {settings.accumulate > 1, "--accumulate"},
      {settings.checkpoint_activations != "none", "--checkpoint-activations"},
  };
  for (const auto& [is_given, flag] : untested) {
    if (is_given) return std::string("with ") + flag + " it is not measured on a GPU";
  }
  return "";
}

}  // namespace

CompileChoice choose_compile(const Settings& settings, int world_size) {
  if (settings.compile) return {.is_on = *settings.compile};
  auto why_not = why_eager(settings, world_size);
  return {.is_on = why_not.empty(), .why_not = std::move(why_not)};
}

}  // namespace tessera::train
