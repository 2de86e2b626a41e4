#include "train/resume.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

namespace tessera::train {
namespace {

using nlohmann::json;

constexpr const char* kState = "trainer";        // JSON, the same on all ranks
constexpr const char* kRandom = "random_state";  // of this rank's generator

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

at::Generator generator() { return at::globalContext().defaultGenerator(at::kCPU); }

std::string random_state() {
  const auto state = generator().get_state();
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

void set_random_state(const std::string& bytes) {
  auto state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(state.mutable_data_ptr()));
  generator().set_state(state);
}

}  // namespace

Extra Trainee::extra_of(const Position& position) const {
  const json state = {{"identity", identity(settings_, batches_)},
                      {"step", position.step},
                      {"tokens", position.tokens},
                      {"seconds", position.seconds},
                      {"skipped", position.skipped},
                      {"sampler", batches_.position()},
                      {"scaler", step_.scaler().state_dict()}};
  return {{kState, state.dump()}, {kRandom, random_state()}};
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

void Trainee::check(const std::string& checkpoint, const Extra& extra) const {
  const auto found = extra.find(kState);
  TORCH_CHECK_VALUE(found != extra.end(), "train: expected a checkpoint of tessera train, got ",
                    checkpoint, ", which holds none of its state");
  const auto saved = json::parse(found->second).at("identity");
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

Position Trainee::load(const std::string& checkpoint) {
  const auto extra = tessera::load(checkpoint, model_, optimizer_);
  check(checkpoint, extra);
  const auto state = json::parse(extra.at(kState));
  batches_.seek(state.at("sampler"));
  if (step_.scaler().is_enabled()) step_.scaler().load_state_dict(state.at("scaler"));
  set_random_state(extra.at(kRandom));
  return {.step = state.at("step"),
          .tokens = state.at("tokens"),
          .seconds = state.at("seconds"),
          .skipped = state.at("skipped")};
}

}  // namespace tessera::train
