#include "train/resume.h"

#include <tessera/dtensor.h>

#include "train/schedule.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <torch/utils.h>

#include <algorithm>
#include <filesystem>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kState = "trainer";        // JSON, the same on all ranks
constexpr const char* kRandom = "random_state";  // of this rank's generators
constexpr const char* kDeviceRandom = "device_random_state";

/// What a model and its data are, as far as a checkpoint depends on it.
json identity(const Settings& settings, const Batches& batches) {
  return {{"blocks", settings.blocks},
          {"width", settings.width},
          {"heads", settings.heads},
          {"context", settings.context},
          {"seed", settings.seed},
          {"validation", settings.validation},
          {"tokenizer", batches.corpus().tokenizer().name()},
          {"data", batches.corpus().fingerprint()}};
}

json shape_of(const DeviceMesh& mesh) { return {mesh.dim_names(), mesh.shape()}; }

std::string state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  const auto state = generator.get_state();
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

void set_state(at::Generator generator, const std::string& bytes) {
  auto state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(state.mutable_data_ptr()));
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Generator host_generator() { return at::globalContext().defaultGenerator(at::kCPU); }

at::Generator device_generator(const Gpt& model) {
  return at::globalContext().defaultGenerator(model->parameters().front().device());
}

}  // namespace

Extra Trainee::extra_of(const Position& position) const {
  const json state = {{"identity", identity(settings_, batches_)},
                      {"mesh", shape_of(layout_.mesh)},
                      {"step", position.step},
                      {"tokens", position.tokens},
                      {"seconds", position.seconds},
                      {"skipped", position.skipped},
                      {"sampler", batches_.position()},
                      {"scaler", step_.scaler().state_dict()}};
  Extra extra = {{kState, state.dump()}, {kRandom, state_of(host_generator())}};
  if (settings_.device != "cpu") extra[kDeviceRandom] = state_of(device_generator(model_));
  return extra;
}

void Trainee::save(const RunFolder& folder, const Position& position) {
  finish_saving();
  pending_ = save_async(folder.checkpoint(position.step), model_, optimizer_, extra_of(position),
                        {.keep_last = static_cast<int>(settings_.keep_last)});
}

void Trainee::finish_saving() {
  if (!pending_) return;
  pending_->wait();
  pending_.reset();
}

std::vector<std::string> Trainee::checkpoints(const RunFolder& folder) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder.checkpoints(), ignored)) {
    if (entry.path().filename().string().starts_with("step-"))
      found.push_back(entry.path().string());
  }
  std::ranges::sort(found, std::greater<>());  // numbers have equally many digits
  return found;
}

void Trainee::check(const std::string& checkpoint, const json& state) const {
  const auto& saved = state.at("identity");
  const auto ours = identity(settings_, batches_);
  for (const auto& [name, value] : ours.items()) {
    const auto theirs = saved.value(name, json());
    TORCH_CHECK_VALUE(theirs == value, "train: expected a checkpoint of this model and data, got ",
                      checkpoint, ", whose ", name, " is ", theirs.dump(), " instead of ",
                      value.dump(),
                      name == "data" ? "; the files under --data have changed: train anew"
                                     : "; give --" + name + " as it was, or train anew");
  }
}

/// On other ranks, or in another layout, a rank has another part of the batch: then it draws anew,
/// the same as those that it shares its part with.
void Trainee::set_random_state(const Extra& extra, const json& state) const {
  if (state.at("mesh") != shape_of(layout_.mesh)) {
    const auto step = state.at("step").get<uint64_t>();
    torch::manual_seed(settings_.seed + 1 + static_cast<uint64_t>(layout_.data_rank) +
                       (step << 20));
    return;
  }
  set_state(host_generator(), extra.at(kRandom));
  const auto found = extra.find(kDeviceRandom);
  if (settings_.device != "cpu" && found != extra.end())
    set_state(device_generator(model_), found->second);
}

Position Trainee::load(const std::string& checkpoint) {
  const auto extra = tessera::load(checkpoint, model_, optimizer_);
  const auto found = extra.find(kState);
  TORCH_CHECK_VALUE(found != extra.end(), "train: expected a checkpoint of tessera train, got ",
                    checkpoint, ", which holds none of its state");
  const auto state = json::parse(found->second);
  check(checkpoint, state);
  set_options(optimizer_, settings_);
  batches_.seek(state.at("sampler"));
  if (step_.scaler().is_enabled() && !state.at("scaler").empty())
    step_.scaler().load_state_dict(state.at("scaler"));
  set_random_state(extra, state);
  return {.step = state.at("step"),
          .tokens = state.at("tokens"),
          .seconds = state.at("seconds"),
          .skipped = state.at("skipped")};
}

}  // namespace tessera::train
