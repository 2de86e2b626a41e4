#include "train/communication.h"

#include "train/sequences.h"

#include <algorithm>
#include <cstdio>

namespace tessera::train {
namespace {

std::string cost_of(double bytes, double seconds) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f MB, %.2f ms", bytes / 1e6, seconds * 1e3);
  return text;
}

/// "blocks.0.up.weight and 3 more".
std::string name_of(const std::vector<std::string>& parameters) {
  const auto more = parameters.size() - 1;
  return parameters.front() + (more == 0 ? "" : " and " + std::to_string(more) + " more");
}

std::vector<UnitCommunication> buckets_of(const ReplicateState& state) {
  std::vector<UnitCommunication> buckets;
  auto* const engine = static_cast<ReplicateEngine*>(state.engine());
  if (engine == nullptr) return buckets;
  const auto stats = engine->stats();
  for (size_t i = 0; i < stats.bucket_seconds.size(); ++i)
    buckets.push_back({.name = name_of(stats.bucket_parameters[i]),
                       .parameters = std::ssize(stats.bucket_parameters[i]),
                       .bytes = static_cast<double>(stats.bucket_bytes[i]),
                       .seconds = stats.bucket_seconds[i]});
  return buckets;
}

}  // namespace

UnitMeter::UnitMeter(const std::shared_ptr<torch::nn::Module>& model)
    : replicated_(replicate_state(*model)) {
  for (const auto& module : model->named_modules()) {
    auto state = fully_shard_state(*module.value());
    if (state == nullptr || state->param_names().empty()) continue;
    units_.push_back(
        {.name = module.key().empty() ? "the rest" : module.key(), .state = std::move(state)});
  }
}

void UnitMeter::begin_step() {
  for (auto& unit : units_) unit.before = unit.state->stats();
}

void UnitMeter::end_step() {
  for (auto& unit : units_) {
    const auto now = unit.state->stats();
    unit.bytes += now.communicated_bytes - unit.before.communicated_bytes;
    unit.seconds += now.communication_seconds - unit.before.communication_seconds;
  }
  ++steps_;
}

std::vector<UnitCommunication> UnitMeter::mean() const {
  if (replicated_) return buckets_of(*replicated_);
  std::vector<UnitCommunication> units;
  const auto steps = static_cast<double>(std::max<int64_t>(1, steps_));
  for (const auto& unit : units_)
    units.push_back({.name = unit.name,
                     .parameters = std::ssize(unit.state->param_names()),
                     .bytes = static_cast<double>(unit.bytes) / steps,
                     .seconds = unit.seconds / steps});
  const bool is_silent = std::ranges::all_of(
      units, [](const auto& unit) { return unit.bytes == 0 && unit.seconds == 0; });
  return is_silent ? std::vector<UnitCommunication>() : units;
}

std::string described(const std::vector<UnitCommunication>& units) {
  constexpr size_t kMostNamed = 3;
  double bytes = 0, seconds = 0;
  for (const auto& unit : units) {
    bytes += unit.bytes;
    seconds += unit.seconds;
  }
  auto slowest = units;
  std::ranges::stable_sort(slowest, std::greater<>(), &UnitCommunication::seconds);
  slowest.resize(std::min(slowest.size(), kMostNamed));
  std::string named;
  for (const auto& unit : slowest)
    named +=
        (named.empty() ? "" : ", ") + unit.name + " (" + cost_of(unit.bytes, unit.seconds) + ")";
  return "communication per step: " + counted(std::ssize(units), "unit") + ", " +
         cost_of(bytes, seconds) + "; most in " + named;
}

nlohmann::json to_json(const std::vector<UnitCommunication>& units) {
  auto rows = nlohmann::json::array();
  for (const auto& unit : units)
    rows.push_back({{"unit", unit.name},
                    {"parameters", unit.parameters},
                    {"bytes", unit.bytes},
                    {"seconds", unit.seconds}});
  return rows;
}

}  // namespace tessera::train
