#include "train/introduction.h"

#include <tessera/comm.h>

#include "train/facts.h"

#include <cstdio>

namespace tessera::train {
namespace {

/// "1 block", "2 blocks".
std::string counted(int64_t count, const char* thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
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

std::vector<std::string> introduction(const Gpt& model, const Batches& batches,
                                      const Layout& layout, const std::vector<UsedDevice>& devices,
                                      const Settings& settings, const CompileChoice& compile,
                                      const std::string& folder) {
  char millions[32];
  std::snprintf(millions, sizeof millions, "%.2f M",
                static_cast<double>(parameter_count(model)) / 1e6);
  const auto& corpus = batches.corpus();
  std::vector<std::string> lines = {
      std::string("GPT of ") + millions + " parameters (" + counted(settings.blocks, "block") +
          ", width " + std::to_string(settings.width) + "), " + counted(corpus.tokens(), "token") +
          " of text in " + counted(corpus.files(), "file"),
      ranks_of(layout, settings) + place_of(devices) + (compile.is_on ? ", compiled" : "") + ", " +
          settings.precision + "; run folder " + folder};
  if (!compile.why_not.empty())
    lines.push_back("runs eagerly, not compiled: " + compile.why_not +
                    "; --compile compiles it, --no-compile leaves this line out");
  if (const auto sharing = sharing_of(devices); !sharing.empty()) lines.push_back(sharing);
  return lines;
}

}  // namespace tessera::train
