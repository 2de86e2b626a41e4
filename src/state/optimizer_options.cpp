#include "state/optimizer_options.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <sstream>

namespace tessera::state {
namespace {

/// Archives are written and read, never both: over a file in memory.
torch::serialize::InputArchive reopened(torch::serialize::OutputArchive& archive) {
  std::stringstream file;
  archive.save_to(file);
  torch::serialize::InputArchive opened;
  opened.load_from(file);
  return opened;
}

}  // namespace

OptionValues read_options(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive written;
  options.serialize(written);
  auto archive = reopened(written);
  OptionValues values;
  for (const auto& name : archive.keys()) archive.read(name, values[name]);
  return values;
}

void write_options(torch::optim::OptimizerOptions& options, const OptionValues& values) {
  torch::serialize::OutputArchive written;
  for (const auto& [name, value] : values) written.write(name, value);
  auto archive = reopened(written);
  options.serialize(archive);
}

}  // namespace tessera::state
