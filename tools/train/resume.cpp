#include "train/resume.h"

#include <tessera/dtensor.h>

#include "corpus/content_hash.h"
#include "train/agreed.h"
#include "train/random_state.h"
#include "train/schedule.h"

#include <torch/utils.h>

#include <algorithm>
#include <filesystem>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kRandom = "random_state";  // of this rank's generators
constexpr const char* kDeviceRandom = "device_random_state";

/// What a model and its data are, as far as a checkpoint depends on it, by the names of flags. The
/// tokenizer before the data: another one makes other data, too.
std::vector<std::pair<std::string, json>> identity(const LanguageModel& model,
                                                   const Settings& settings,
                                                   const Batches& batches) {
  data::ContentHash config;
  config.add(model.config());
  return {{"model", settings.model},
          {"blocks", settings.blocks},
          {"width", settings.width},
          {"heads", settings.heads},
          {"kv-heads", settings.kv_heads},
          {"feed-forward", settings.feed_forward},
          {"vocabulary", settings.vocabulary},
          {"tie-head", settings.tie_head ? json(*settings.tie_head) : json()},
          {settings.from.empty() ? "preset" : "from", config.text()},  // its config.json
          {"context", settings.context},
          {"seed", settings.seed},
          {"validation", settings.validation},
          {"lora", settings.lora},
          {"lora-alpha", settings.lora_alpha},
          {"lora-targets", settings.lora_targets},
          {"tokenizer", batches.sequences().tokenizer().name()},
          {"optimizer", settings.optimizer},
          {"ema", settings.ema > 0 ? json(settings.ema) : json()},
          {settings.sft.empty() ? "data" : "sft", batches.sequences().fingerprint()}};
}

/// "vocabulary.json" of "vocabulary.json#checksum".
std::string file_of(const json& tokenizer) {
  const auto name = tokenizer.is_string() ? tokenizer.get<std::string>() : "";
  return name.substr(0, name.rfind('#'));
}

std::string difference(const std::string& name, const json& saved, const json& ours) {
  if (name == "tokenizer" && file_of(saved) == file_of(ours))
    return "tokenizer differs: " + file_of(ours) + " has changed since; give the file as it was";
  const auto shown = [&](const json& value) {
    return name == "ema" && value.is_null() ? "0" : value.dump();
  };
  return name + " is " + shown(saved) + ", but --" + name + " is " + shown(ours) + "; give --" +
         name + " as it was";
}

std::string data_difference(const std::string& name, const json& saved, const json& ours) {
  const auto file = difference_of_contents(saved, ours);
  return name + " differs: the files " + (name == "data" ? "under" : "of") + " --" + name +
         " have changed" + (file.empty() ? ", or others are given" : ": " + file) +
         "; give those it was trained on, as they were";
}

/// What is beside tensors, without reading those: a module that has none takes none.
Extra read_extra(const std::string& checkpoint) {
  torch::nn::Module nothing;
  return tessera::load(checkpoint, nothing, {.strict = false});
}

json shape_of(const DeviceMesh& mesh) { return {mesh.dim_names(), mesh.shape()}; }

c10::Device place_of(const LanguageModel& model) {
  return model.module()->parameters().front().device();
}

}  // namespace

Extra TrainingState::extra_of(const Position& position) const {
  json own;
  for (auto& [name, value] : identity(model_, settings_, batches_)) own[name] = std::move(value);
  const json state = {{"identity", own},
                      {"files", contents_of(batches_.sequences())},
                      {"mesh", shape_of(layout_.mesh)},
                      {"step", position.step},
                      {"tokens", position.tokens},
                      {"seconds", position.seconds},
                      {"elapsed", position.elapsed},
                      {"skipped", position.skipped},
                      {"sampler", batches_.position()},
                      {"scaler", step_.scaler().state_dict()}};
  Extra extra = {{kTrainerState, state.dump()}, {kRandom, random_state(at::kCPU)}};
  if (settings_.device != "cpu") extra[kDeviceRandom] = random_state(place_of(model_));
  if (powersgd_) extra.merge(powersgd_->save(*model_.module()));
  return extra;
}

void TrainingState::save(const RunFolder& folder, const Position& position) {
  finish_saving();
  pending_ = save_async(folder.checkpoint(position.step), saved_, optimizer_, extra_of(position),
                        {.keep_last = static_cast<int>(settings_.keep_last)});
}

void TrainingState::finish_saving() {
  if (!pending_) return;
  pending_->wait();
  pending_.reset();
}

std::vector<std::string> TrainingState::checkpoints(const RunFolder& folder) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder.checkpoints(), ignored)) {
    if (entry.path().filename().string().starts_with("step-"))
      found.push_back(entry.path().string());
  }
  std::ranges::sort(found, std::greater<>());  // numbers have equally many digits
  return found;
}

json TrainingState::checked_state(const std::string& checkpoint, const Extra& extra) const {
  const auto found = extra.find(kTrainerState);
  if (found == extra.end())
    throw AgreedError("--resume: expected a checkpoint of tessera train, got " + checkpoint +
                          ", which holds none of its state",
                      kWrongSettings);
  auto state = json::parse(found->second);
  const auto& saved = state.at("identity");
  for (const auto& [name, value] : identity(model_, settings_, batches_)) {
    const auto theirs = saved.value(name, json());
    if (theirs == value) continue;
    const auto what = name == "data" || name == "sft"
                          ? data_difference(name, state.value("files", json::array()),
                                            contents_of(batches_.sequences()))
                          : difference(name, theirs, value);
    throw AgreedError("--resume: expected a checkpoint of this model and data, got " + checkpoint +
                          ", whose " + what + ", or train anew",
                      kWrongSettings);
  }
  return state;
}

void TrainingState::load_random_state(const Extra& extra) const {
  set_random_state(at::kCPU, extra.at(kRandom));
  const auto found = extra.find(kDeviceRandom);
  if (settings_.device != "cpu" && found != extra.end())
    set_random_state(place_of(model_), found->second);
}

/// The same as those draw that this rank shares its part of the batch with.
void TrainingState::draw_anew(uint64_t step) const {
  torch::manual_seed(settings_.seed + 1 + static_cast<uint64_t>(layout_.data_rank) + (step << 20));
}

Position TrainingState::load(const std::string& checkpoint) {
  const auto extra = read_extra(checkpoint);
  const auto state = checked_state(checkpoint, extra);
  tessera::load(checkpoint, saved_, optimizer_);
  set_options(optimizer_, settings_);
  batches_.seek(state.at("sampler"));
  if (step_.scaler().is_enabled() && !state.at("scaler").empty())
    step_.scaler().load_state_dict(state.at("scaler"));
  // On other ranks, or in another layout, a rank has another part of the batch.
  if (state.at("mesh") == shape_of(layout_.mesh)) {
    load_random_state(extra);
    if (powersgd_) powersgd_->load(*model_.module(), extra);
  } else {
    draw_anew(state.at("step").get<uint64_t>());
  }
  return {.step = state.at("step"),
          .tokens = state.at("tokens"),
          .seconds = state.at("seconds"),
          .elapsed = state.value("elapsed", 0.0),
          .skipped = state.at("skipped")};
}

}  // namespace tessera::train
