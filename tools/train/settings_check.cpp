#include "command_line.h"
#include "train/run_paths.h"
#include "train/settings.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <stdexcept>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

// Along one dimension: the product of three fits 64 bits.
constexpr int64_t kMostRanks = 1 << 20;
// What tensors take at least; all in double, which no product of settings overflows.
constexpr double kBytesOfValue = 4;
constexpr double kBytesWithGradient = 8;  // and the two averages of AdamW beside it
constexpr double kBytesOfToken = 16;      // with its target
constexpr double kVocabulary = 256;       // of bytes, the smallest

[[noreturn]] void refuse_settings(const std::string& message) {
  throw CLI::ValidationError(message);
}

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) || error;  // whoever opens it knows why it cannot be looked at
}

/// What the machine has, or the control group that this process is confined to.
double memory_of_host() {
  const auto pages = static_cast<double>(sysconf(_SC_PHYS_PAGES));
  double memory = pages * static_cast<double>(sysconf(_SC_PAGESIZE));
  double limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) memory = std::min(memory, limit);
  return memory;
}

std::string in_gigabytes(double bytes) {
  std::ostringstream text;
  text << std::setprecision(3) << bytes / 1e9 << " GB";
  return text.str();
}

/// The folder itself, or the nearest above it that is there: where it would be made.
fs::path nearest_there(const fs::path& path) {
  auto nearest = fs::absolute(path).lexically_normal();
  while (!is_there(nearest) && nearest.has_relative_path()) nearest = nearest.parent_path();
  return nearest;
}

}  // namespace

std::vector<MeshDim> parse_mesh(const std::string& text) {
  const std::vector<std::string> known = {"pp", "replicas", "dp", "cp", "tp"};
  std::vector<MeshDim> dims;
  if (text.empty()) return dims;
  for (const auto& part : CLI::detail::split(text, ',')) {
    const auto equals = part.find('=');
    const auto name = part.substr(0, equals);
    int64_t size = 0;
    if (equals != std::string::npos) {
      const auto* end = part.data() + part.size();
      const auto* begin = part.data() + equals + 1;
      const auto [stop, error] = std::from_chars(begin, end, size);
      if (error == std::errc::result_out_of_range && *begin != '-') size = kMostRanks + 1;
      if (stop != end) size = 0;
    }
    const auto meant = tool::nearest_word(name, known);
    if (size > kMostRanks)
      throw std::invalid_argument("expected at most " + std::to_string(kMostRanks) +
                                  " ranks along a dimension, got '" + part + "'");
    const auto at = std::ranges::find(known, name) - known.begin();
    if (at == std::ssize(known) || size < 1) {
      throw std::invalid_argument(
          "expected NAME=RANKS of pp, replicas, dp, cp and tp, e.g. dp=2,tp=2, got '" + part + "'" +
          (meant.empty() || meant == name ? "" : "; did you mean " + meant + "?"));
    }
    const bool in_order =
        dims.empty() || std::ranges::find(known, dims.back().first) - known.begin() < at;
    if (!in_order) {
      throw std::invalid_argument(
          "expected pp, replicas, dp, cp and tp once each, in this order, got '" + text + "'");
    }
    dims.emplace_back(name, size);
  }
  return dims;
}

namespace {

bool is_own_model(const Settings& settings) {
  return settings.model == "gpt" ||
         (settings.model == "auto" && settings.preset.empty() && settings.from.empty());
}

/// With stages.
void check_pipeline(const Settings& settings, std::map<std::string, int64_t> sizes) {
  const Settings defaults;
  const bool has_words = settings.pipeline_schedule != defaults.pipeline_schedule ||
                         settings.microbatches != defaults.microbatches;
  if (!sizes.contains("pp")) {
    if (has_words)
      refuse_settings(
          "--pipeline-schedule, --microbatches: expected them with pp in --mesh, got '" +
          settings.mesh + "'");
    return;
  }
  const std::pair<bool, std::string> refused[] = {
      {sizes.contains("tp") || sizes.contains("cp") || sizes.contains("replicas"),
       "others than dp in --mesh"},
      {settings.parallel != "replicate", "--parallel " + settings.parallel},
      {!is_own_model(settings), "models other than --model gpt"},
      {!settings.sft.empty(), "--sft"},
      {settings.lora > 0, "--lora"},
      {settings.dropout > 0, "--dropout"},
      {settings.ema > 0, "--ema"},
      {settings.accumulate > 1, "--accumulate: --microbatches are its parts"},
      {settings.optimizer != "adamw", "--optimizer " + settings.optimizer},
      {settings.compile.value_or(false), "--compile"},
      {settings.checkpoint_activations != "none", "--checkpoint-activations"},
      {settings.comm_hook != "none", "--comm-hook"},
      {settings.precision != "fp32", "--precision " + settings.precision}};
  for (const auto& [is_given, flag] : refused) {
    if (is_given)
      refuse_settings("--mesh: expected pp without " + flag + ", got '" + settings.mesh + "'");
  }
  const bool has_two = settings.pipeline_schedule == "interleaved" ||
                       settings.pipeline_schedule == "zbv-zero-bubble";
  const auto stages = sizes["pp"] * (has_two ? 2 : 1);
  if (stages > settings.blocks + 2)
    refuse_settings("--mesh: expected at most " + std::to_string(settings.blocks + 2) +
                    " stages (--blocks, embeddings and head), got " + std::to_string(stages) +
                    " with --pipeline-schedule " + settings.pipeline_schedule);
  const auto rows = settings.batch / (sizes.contains("dp") ? sizes["dp"] : 1);
  const bool has_rounds = settings.pipeline_schedule == "interleaved";
  if (settings.microbatches > rows || (has_rounds && settings.microbatches % sizes["pp"] != 0))
    refuse_settings("--microbatches: expected at most " + std::to_string(rows) +
                    ", the sequences of a rank along the batch" +
                    (has_rounds ? ", and a multiple of pp" : "") + ", got " +
                    std::to_string(settings.microbatches));
}

/// With sequences in parts.
void check_context(const Settings& settings, std::map<std::string, int64_t> sizes) {
  if (!sizes.contains("cp")) return;
  const std::pair<bool, std::string> refused[] = {
      {sizes.contains("tp"), "tp in --mesh"},
      {settings.parallel == "hybrid", "--parallel hybrid"},
      {!settings.sft.empty(), "--sft, whose rows hold several samples"},
      {settings.dropout > 0, "--dropout"},
      {settings.compile.value_or(false), "--compile"},
      {settings.checkpoint_activations != "none" &&
           (settings.model == "gpt" ||
            (settings.model == "auto" && settings.preset.empty() && settings.from.empty())),
       "--checkpoint-activations of --model gpt, whose blocks are computed again outside of it"}};
  for (const auto& [is_given, flag] : refused) {
    if (is_given)
      refuse_settings("--mesh: expected cp without " + flag + ", got '" + settings.mesh + "'");
  }
  const auto chunks = 2 * sizes["cp"];
  if (settings.context % chunks != 0)
    refuse_settings("--context: expected a multiple of " + std::to_string(chunks) +
                    " (two chunks of a sequence for each rank along cp), got " +
                    std::to_string(settings.context) + "; the nearest is " +
                    std::to_string((settings.context + chunks - 1) / chunks * chunks));
}

}  // namespace

void check(const Settings& settings, int world_size) {
  const auto dims = parse_mesh(settings.mesh);
  std::map<std::string, int64_t> sizes;
  int64_t ranks = 1;
  for (const auto& [name, size] : dims) {
    sizes[name] = size;
    if (ranks <= kMostRanks * kMostRanks) ranks *= size;  // already more than there are, else
  }
  if (dims.empty()) sizes["dp"] = ranks = world_size;
  if (ranks != world_size)
    refuse_settings("--mesh: expected " + std::to_string(world_size) + " ranks, got '" +
                    settings.mesh + "', which has " + std::to_string(ranks));
  check_pipeline(settings, sizes);
  check_context(settings, sizes);
  const bool has_data = sizes.contains("dp") || sizes.contains("cp"),
             is_hybrid = settings.parallel == "hybrid";
  if (is_hybrid && !(sizes.contains("dp") && sizes.contains("replicas")))
    refuse_settings("--parallel hybrid: expected --mesh replicas=R,dp=D, got '" + settings.mesh +
                    "'");
  if (!is_hybrid && sizes.contains("replicas"))
    refuse_settings("--mesh: expected replicas with --parallel hybrid alone, got --parallel " +
                    settings.parallel);
  if (settings.parallel != "replicate" && !has_data)
    refuse_settings("--parallel " + settings.parallel + ": expected dp in --mesh, got '" +
                    settings.mesh + "'");
  if (settings.comm_hook != "none" && (settings.parallel != "replicate" || !has_data))
    refuse_settings(
        "--comm-hook: expected --parallel replicate and ranks along dp, got --parallel " +
        settings.parallel + " and --mesh '" + settings.mesh + "'");
  const auto tp = sizes.contains("tp") ? sizes["tp"] : 1;
  if (settings.heads % tp != 0 || settings.kv_heads % tp != 0)
    refuse_settings("--mesh: expected tp to divide --heads " + std::to_string(settings.heads) +
                    (settings.kv_heads == 0 || settings.kv_heads == settings.heads
                         ? ""
                         : " and --kv-heads " + std::to_string(settings.kv_heads)) +
                    ", got tp=" + std::to_string(tp));
  const auto cp = sizes.contains("cp") ? sizes["cp"] : 1;
  const auto pp = sizes.contains("pp") ? sizes["pp"] : 1;
  const auto data_ranks = ranks / tp / cp / pp, parts = data_ranks * settings.accumulate;
  if (settings.batch % parts != 0)
    refuse_settings("--batch: expected a multiple of " + std::to_string(parts) +
                    " (ranks along the batch " + std::to_string(data_ranks) + " x --accumulate " +
                    std::to_string(settings.accumulate) + "), got " +
                    std::to_string(settings.batch) + "; the nearest is " +
                    std::to_string((settings.batch + parts - 1) / parts * parts));
}

namespace {

/// Of matrices alone. Heads may be wider than their share of the width: a lower bound.
double values_of(const Settings& settings) {
  const auto blocks = static_cast<double>(settings.blocks);
  const auto width = static_cast<double>(settings.width);
  const double vocabulary = settings.vocabulary == 0 ? kVocabulary : settings.vocabulary;
  if (settings.model == "auto" || settings.model == "gpt" || settings.model == "gpt2")
    return blocks * 12 * width * width +
           (vocabulary + static_cast<double>(settings.context)) * width;
  const double heads = std::max<double>(1, settings.heads);
  const double of_keys = settings.kv_heads == 0 ? 1 : settings.kv_heads / heads;
  return blocks * width * (width * (2 + 2 * of_keys) + 3.0 * settings.feed_forward) +
         vocabulary * width;
}

/// On this machine, of each number of the model on a rank.
double bytes_of_value(const Settings& settings, double parts, double shards) {
  const bool is_whole_first = settings.model == "auto" || settings.model == "gpt";
  // Every rank makes the whole of a gpt before it gives parts of it away.
  const double made = is_whole_first ? kBytesOfValue : kBytesOfValue / shards;
  if (settings.device != "cpu") return is_whole_first ? made : 0;
  double averages = settings.optimizer_state == "fp32"   ? 8
                    : settings.optimizer_state == "bf16" ? 4
                                                         : 2;
  const double of_weights = settings.ema > 0 ? kBytesOfValue : 0;  // averages, of frozen ones, too
  if (settings.lora > 0) return std::max(made, (kBytesOfValue + of_weights) / parts / shards);
  if (settings.optimizer == "muon") averages = std::min(averages, 4.0);
  averages += of_weights;
  return std::max(made, (kBytesWithGradient + averages) / parts / shards);
}

}  // namespace

void check_memory(const Settings& settings, int world_size, int ranks_here) {
  std::map<std::string, double> sizes;
  for (const auto& [name, size] : parse_mesh(settings.mesh))
    sizes[name] = static_cast<double>(size);
  const auto ranks_along = [&](const char* name) {
    const auto found = sizes.find(name);
    return found == sizes.end() ? 1 : found->second;
  };
  const double tp = ranks_along("tp"), pp = ranks_along("pp");
  const double data_ranks = world_size / tp / pp;
  const double shards = settings.parallel == "replicate" ? 1
                        : sizes.empty()                  ? data_ranks
                                                         : ranks_along("dp") * ranks_along("cp");
  const auto blocks = static_cast<double>(settings.blocks);
  const auto width = static_cast<double>(settings.width);
  const auto context = static_cast<double>(settings.context);
  const double model = values_of(settings) * bytes_of_value(settings, tp * pp, shards);
  const double tokens = static_cast<double>(settings.batch) / data_ranks /
                        static_cast<double>(settings.accumulate) * context;
  // Of the residual stream and its norms, which stages alone split; and logits with their gradient.
  const double kept = settings.checkpoint_activations == "none" ? 4 : 1;
  // Stages may have as little as one microbatch under way at a time.
  const double under_way = pp > 1 && settings.pipeline_schedule != "gpipe"
                               ? 1 / static_cast<double>(settings.microbatches)
                               : 1;
  const bool is_here = settings.device == "cpu";
  const double of_stages =
      kBytesOfValue * under_way / pp * (kept * blocks * width + 2 * kVocabulary);
  const double of_token = kBytesOfToken + (is_here ? of_stages : 0);
  const double memory = memory_of_host();
  if (model * ranks_here > memory)
    refuse_settings("--blocks, --width, --context: expected a model that fits into the " +
                    in_gigabytes(memory) + " of memory here, got one that takes more than " +
                    in_gigabytes(model * ranks_here) + " on " + std::to_string(ranks_here) +
                    (ranks_here == 1 ? " rank" : " ranks"));
  if (tokens * of_token * ranks_here > memory)
    refuse_settings("--batch, --context, --blocks, --width: expected batches that fit into the " +
                    in_gigabytes(memory) + " of memory here, got some that take more than " +
                    in_gigabytes(tokens * of_token * ranks_here) + " on " +
                    std::to_string(ranks_here) + (ranks_here == 1 ? " rank" : " ranks") +
                    "; lower --batch, or raise --accumulate");
}

void check_paths(const Settings& settings) {
  const std::pair<const char*, const std::vector<std::string>*> texts[] = {
      {"--data", &settings.data}, {"--validation-data", &settings.validation_data}};
  for (const auto& [flag, paths] : texts) {
    for (const auto& path : *paths) {
      if (!is_there(path))
        refuse_settings(std::string(flag) + ": expected files and folders, got '" + path +
                        "', which is not there");
    }
  }
  for (const auto& path : settings.sft) {
    if (!is_there(path))
      refuse_settings("--sft: expected files with conversations, got '" + path +
                      "', which is not there");
  }
  if (!settings.sft.empty() && settings.data != Settings().data)
    refuse_settings("--sft: expected it without --data, which is read in its place; give one");
  if (!settings.sft.empty() && !settings.validation_data.empty())
    refuse_settings(
        "--validation-data: expected it with --data; of --sft the end is kept, see --validation");
  if (settings.sft.empty() && settings.chat_format != "auto")
    refuse_settings("--chat-format: expected it with --sft, whose conversations it writes");
  const bool has_adapter_words =
      settings.lora_alpha != 0 || settings.lora_dropout != 0 || !settings.lora_targets.empty();
  if (settings.lora == 0 && has_adapter_words)
    refuse_settings("--lora-alpha, --lora-dropout, --lora-targets: expected them with --lora RANK");
  const auto& tokenizer = settings.tokenizer;
  if (tokenizer != "auto" && tokenizer != "bytes" && !is_there(tokenizer))
    refuse_settings("--tokenizer: expected 'bytes' or a tokenizer.json, got '" + tokenizer +
                    "', which is not there");
  if (!settings.from.empty() && !is_there(fs::path(settings.from) / "config.json"))
    refuse_settings(
        "--from: expected a Hugging Face folder, with config.json and weights as "
        "safetensors, got '" +
        settings.from + "', which has no config.json");
  const auto folder = nearest_there(settings.run.empty() ? "runs" : settings.run);
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored))
    refuse_settings("--run: expected a folder, or a path where one can be made, got '" +
                    settings.run + "', but " + folder.string() + " is a file");
  const auto reason = settings.run.empty() ? "" : why_no_run_folder(settings.run);
  if (!reason.empty())
    refuse_settings("--run: expected a new folder or that of a run, got '" + settings.run +
                    "', which " + reason + "; name one in it");
  if (access(folder.c_str(), W_OK | X_OK) != 0)
    refuse_settings("--run: expected a folder to write to, got '" + settings.run + "', but " +
                    folder.string() + " is not writable; use another --run");
}

}  // namespace tessera::train
