// `tessera export`: a run's model as a Hugging Face folder.
#include <tessera/lora.h>
#include <tessera/serialize.h>

#include "command_line.h"
#include "train/adapters.h"
#include "train/agreed.h"
#include "train/averages.h"
#include "train/language_model.h"
#include "train/resume.h"
#include "train/run_folder.h"
#include "train/run_paths.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <iostream>
#include <map>

namespace {

namespace fs = std::filesystem;
using tessera::train::Settings;

struct ExportOptions {
  std::string from, to;
  std::string dtype = "fp32";
  bool has_adapters = false, has_averages = false;
};

const std::map<std::string, at::ScalarType> kDtypes = {
    {"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};

/// Of a run, or of one of its saved checkpoints.
struct Source {
  fs::path run;
  std::string checkpoint;
};

Source find_source(const fs::path& path) {
  Source source{.run = path, .checkpoint = {}};
  if (fs::exists(path / "config.toml")) {
    const auto newest = tessera::latest_checkpoint((path / "checkpoints").string());
    if (!newest)
      throw CLI::ValidationError("RUN", "expected a run with a saved checkpoint, got '" +
                                            path.string() + "', which has none yet");
    source.checkpoint = *newest;
    return source;
  }
  auto place = fs::absolute(path).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();  // it ended by a slash
  source.run = place.parent_path().parent_path();
  source.checkpoint = place.string();
  if (!fs::exists(source.run / "config.toml"))
    throw CLI::ValidationError(
        "RUN",
        "expected the folder of a run of tessera train, or one of its checkpoints, as "
        "runs/NAME/checkpoints/step-00001500, got '" +
            path.string() + "', which is neither");
  return source;
}

Settings settings_of(const fs::path& run) {
  CLI::App app;
  Settings settings;
  const auto fields = tessera::train::add_settings(app, settings);
  tessera::train::parse_settings(app, fields, settings,
                                 {"--config", (run / "config.toml").string()});
  return tessera::train::with_sizes(settings);
}

/// It may lie elsewhere by now: in a folder of token shards that was moved.
void check_tokenizer(const Source& source, const Settings& settings, const std::string& ours) {
  torch::nn::Module nothing;
  const auto extra = tessera::load(source.checkpoint, nothing, {.strict = false});
  const auto state = nlohmann::json::parse(extra.at(tessera::train::kTrainerState));
  const auto trained = state.at("identity").at("tokenizer").get<std::string>();
  TORCH_CHECK_VALUE(
      ours == trained, "expected the tokenizer that ", source.run.string(), " was trained with, ",
      trained, ", got ", ours,
      settings.data.empty()
          ? std::string("; put the file back as it was")
          : "; put it back as it was: --tokenizer, or the folder of token shards of --data " +
                settings.data.front());
}

void write_adapters(const ExportOptions& options, const Source& source, const Settings& settings,
                    tessera::train::LanguageModel& model) {
  if (settings.lora == 0 || settings.model == "gpt")
    throw CLI::ValidationError("--adapters",
                               "expected a run with --lora of a published kind of "
                               "model, got '" +
                                   options.from + "', which has " +
                                   (settings.lora == 0 ? "no adapters" : "layers of its own"));
  if (settings.from.empty())
    throw CLI::ValidationError("--adapters",
                               "expected a run with --from, whose weights its adapters are for; "
                               "of this one export the whole model, without --adapters");
  if (options.dtype != "fp32")
    throw CLI::ValidationError("--dtype", "expected it without --adapters, which are in fp32");
  tessera::save_lora(
      options.to, *model.module(),
      {.group = {}, .base_model = settings.from, .fan_in_fan_out = settings.model == "gpt2"});
  std::cout << "wrote the adapters of " << source.checkpoint << " to " << options.to
            << "; in Python: PeftModel.from_pretrained(model, \"" << options.to << "\")\n";
}

void write_folder(const ExportOptions& options) {
  const auto source = find_source(options.from);
  if (fs::exists(fs::path(options.to) / "config.toml"))
    throw CLI::ValidationError("FOLDER", "expected a folder for the model, got '" + options.to +
                                             "', which is that of a run");
  const auto settings = settings_of(source.run);
  const auto tokenizer = tessera::train::make_tokenizer(settings);
  check_tokenizer(source, settings, tokenizer.name());
  const auto model = tessera::train::make_language_model(settings, tokenizer.vocabulary());
  model->place(at::kCPU);
  tessera::train::add_adapters(*model, settings);
  if (options.has_averages && settings.ema == 0)
    throw CLI::ValidationError(
        "--ema", "expected a run with --ema, got '" + options.from + "', which keeps no averages");
  {
    const auto average = tessera::train::make_average(*model, settings);
    tessera::load(source.checkpoint, tessera::train::module_with(*model, average.get()));
    if (options.has_averages) tessera::train::take_averages(*model, *average);
  }
  if (options.has_adapters) return write_adapters(options, source, settings, *model);
  if (settings.lora > 0) {
    tessera::merge_lora(*model->module());
    tessera::remove_lora(*model->module());
  }
  model->module()->to(kDtypes.at(options.dtype));
  model->export_to(options.to, settings.tokenizer);
  std::cout << "wrote " << model->name() << " of " << source.checkpoint << " to " << options.to
            << "; in Python: AutoModelForCausalLM.from_pretrained(\"" << options.to << "\")\n";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Writes the model of a run as a Hugging Face folder, which transformers loads",
               "tessera export");
  ExportOptions options;
  app.add_option("RUN", options.from, "A run's folder, or that of one of its checkpoints")
      ->required();
  app.add_option("FOLDER", options.to, "Where config.json, weights and tokenizer are written")
      ->required();
  app.add_option("--dtype", options.dtype, "Of the weights")
      ->capture_default_str()
      ->check(CLI::IsMember(kDtypes));
  app.add_flag("--adapters", options.has_adapters,
               "Of a run with --lora: the adapters alone, as peft loads them");
  app.add_flag("--ema", options.has_averages,
               "Of a run with --ema: the averages in place of the weights");
  app.footer("tessera export runs/NAME model --dtype bf16");
  try {
    tessera::tool::refuse_unknown_options(app, {argv + 1, argv + argc});
    app.parse(argc, argv);
    write_folder(options);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "tessera export: " << error.what() << "; see tessera export --help\n";
    return tessera::train::kWrongSettings;
  } catch (const std::exception& error) {
    std::cerr << "tessera export: " << tessera::train::message_of(error) << "\n";
    return 1;
  }
}
