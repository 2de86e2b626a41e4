#include "train/facts.h"

#include <tessera/comm.h>
#include <tessera/dtensor.h>

#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <set>
#include <sstream>

namespace tessera::train {
namespace {

using nlohmann::json;

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string time_now() {
  const auto now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

template <class T>
std::string text_of(const T& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

json row_of(const std::string& name, const at::Tensor& parameter) {
  const bool is_spread = is_dtensor(parameter);
  const auto local = is_spread ? DTensor::of(parameter).to_local() : parameter;
  return {{"name", name},
          {"shape", parameter.sizes().vec()},
          {"dtype", text_of(parameter.scalar_type())},
          {"placements", is_spread ? text_of(DTensor::of(parameter).placements()) : "Replicate()"},
          {"local_shape", local.sizes().vec()},
          {"bytes_per_rank", local.nbytes()}};
}

json start_of(const json& facts, int64_t first_step) {
  return {{"command", facts.value("command", json())},
          {"started", facts.value("started", json())},
          {"ranks", facts.value("world_size", json())},
          {"first_step", first_step}};
}

/// Of a run.json, which may be one from before starts were listed, or broken.
json starts_in(const std::string& text) {
  const auto facts = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!facts.is_object()) return json::array();
  const auto starts = facts.value("starts", json());
  return starts.is_array() ? starts : json::array({start_of(facts, 1)});
}

}  // namespace

int64_t parameter_count(const LanguageModel& model) {
  int64_t count = 0;
  for (const auto& parameter : model.module()->parameters()) count += parameter.numel();
  return count;
}

json facts_of(const LanguageModel& model, const Layout& layout, const Batches& batches,
              const std::string& command) {
  const c10::AutoGradMode no_grad(false);
  std::set<std::string> hosts;
  for (const auto& host : gather_bytes(host_name())) hosts.insert(host);
  json sharding = json::array();
  for (const auto& parameter : model.module()->named_parameters())
    sharding.push_back(row_of(parameter.key(), parameter.value()));
  return {{"version", TESSERA_VERSION},
          {"started", time_now()},
          {"command", command},
          {"world_size", world_size()},
          {"mesh", {{"dim_names", layout.mesh.dim_names()}, {"shape", layout.mesh.shape()}}},
          {"hosts", hosts},
          {"device", layout.mesh.device_type() == c10::DeviceType::CUDA ? "cuda" : "cpu"},
          {"parameters", parameter_count(model)},
          {"dataset",
           {{"tokens", batches.sequences().tokens()},
            {"files", batches.sequences().contents().size()},
            {"tokenizer", batches.sequences().tokenizer().name()}}},
          {"sharding", sharding}};
}

json with_starts(json facts, const std::string& earlier, int64_t first_step) {
  auto starts = starts_in(earlier);
  starts.push_back(start_of(facts, first_step));
  if (starts[0].is_object()) {
    for (const char* name : {"command", "started"})
      facts[name] = starts[0].value(name, json(facts[name]));
  }
  facts["starts"] = std::move(starts);
  return facts;
}

namespace {

std::string in_millions(int64_t count) {
  char text[32];
  const auto millions = static_cast<double>(count) / 1e6;
  std::snprintf(text, sizeof text, millions < 0.01 ? "%.4f M" : "%.2f M", millions);
  return text;
}

/// ", 0.02 M of them in adapters of rank 8".
std::string adapters_of(const LanguageModel& model, const Settings& settings) {
  if (settings.lora == 0) return "";
  int64_t count = 0;
  for (const auto& parameter : model.module()->parameters())
    count += parameter.requires_grad() ? parameter.numel() : 0;
  return ", " + in_millions(count) + " of them in adapters of rank " +
         std::to_string(settings.lora);
}

/// "2 ranks (replicate, dp=2)".
std::string ranks_of(const Layout& layout, const Settings& settings) {
  auto text = counted(world_size(), "rank");
  if (world_size() == 1) return text;
  text += " (" + settings.parallel;
  for (size_t i = 0; i < layout.mesh.dim_names().size(); ++i)
    text += ", " + layout.mesh.dim_names()[i] + "=" + std::to_string(layout.mesh.size(i));
  return text + ")";
}

/// " on 1 GPU (NVIDIA H200)"; empty on the CPU.
std::string place_of(const std::vector<UsedDevice>& devices) {
  if (devices.empty()) return "";
  const auto& name = devices.front().name;
  return " on " + counted(std::ssize(devices), "GPU") + (name.empty() ? "" : " (" + name + ")");
}

}  // namespace

std::vector<std::string> introduction(const LanguageModel& model, const Batches& batches,
                                      const Layout& layout, const std::vector<UsedDevice>& devices,
                                      const Settings& settings, const CompileChoice& compile,
                                      const std::string& folder) {
  std::vector<std::string> lines = {
      model.name() + " of " + in_millions(parameter_count(model)) + " parameters (" +
          counted(settings.blocks, "block") + ", width " + std::to_string(settings.width) + ")" +
          adapters_of(model, settings) + ", " + batches.sequences().described(),
      ranks_of(layout, settings) + place_of(devices) + (compile.is_on ? ", compiled" : "") + ", " +
          settings.precision + "; run folder " + folder};
  if (settings.ema > 0)
    lines.push_back("averages of the weights (--ema " + json(settings.ema).dump() +
                    ") are validated and sampled");
  if (!compile.why_not.empty())
    lines.push_back("runs eagerly, not compiled: " + compile.why_not +
                    "; --compile compiles it, --no-compile leaves this line out");
  if (const auto sharing = sharing_of(devices); !sharing.empty()) lines.push_back(sharing);
  return lines;
}

}  // namespace tessera::train
