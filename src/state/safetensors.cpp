#include <tessera/dtensor.h>
#include <tessera/serialize/safetensors.h>

#include "state/export_files.h"
#include "state/files/tensor_files.h"
#include "state/read_values.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {
namespace {

/// Names, dtypes and shapes in the order of a file.
std::vector<state::FileEntry> sorted_entries(std::vector<state::FileEntry> entries) {
  std::sort(entries.begin(), entries.end(), state::comes_first);
  return entries;
}

}  // namespace

StateDict read_safetensors(const std::string& file) {
  const auto source = state::open_tensors("read_safetensors", file);
  StateDict tensors;
  for (const auto& name : source->names())
    tensors.insert(name, state::read_whole(*source, *source->find(name)));
  return tensors;
}

void write_safetensors(const std::string& file, const StateDict& tensors) {
  constexpr const char* kFunction = "write_safetensors";
  const c10::AutoGradMode no_grad(false);
  std::vector<state::FileEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(tensor.defined() && !is_dtensor(tensor), kFunction,
                      ": expected plain tensors, got ",
                      tensor.defined() ? "a distributed one" : "an undefined one", " for '", name,
                      "'; use export_safetensors for models that are distributed");
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  }
  entries = sorted_entries(std::move(entries));
  const auto header = state::layout_file(kFunction, entries);
  state::ReplacedFile output(kFunction, file);
  output.file().write(header.data(), header.size());
  for (const auto& entry : entries) state::write_value(output.file(), tensors[entry.name]);
  output.publish();
}

void export_safetensors(const std::string& file, nn::ModuleRef module, Group group) {
  state::export_file("export_safetensors", file, *module, std::move(group));
}

LoadReport import_safetensors(const std::string& file, nn::ModuleRef module, LoadOptions options) {
  constexpr const char* kFunction = "import_safetensors";
  const auto source = state::open_tensors(kFunction, file);
  return state::import_values(kFunction, file, *module, *source, options.strict);
}

}  // namespace tessera
