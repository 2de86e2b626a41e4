#include <tessera/dtensor.h>
#include <tessera/serialize/safetensors.h>

#include "state/collective_section.h"
#include "state/files/disk.h"
#include "state/files/stored_checkpoint.h"
#include "state/holdings.h"
#include "state/read_values.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>

namespace tessera {
namespace {

/// A file that takes the place of an older one when it is complete.
class ReplacedFile {
 public:
  ReplacedFile(std::string function, const std::string& path)
      : function_(std::move(function)),
        path_(std::filesystem::absolute(path).lexically_normal()),
        growing_(path_.parent_path() / ("." + path_.filename().string() + ".saving")) {
    std::error_code error;
    TORCH_CHECK_VALUE(path_.has_filename() && !std::filesystem::is_directory(path_, error),
                      function_, ": ", path, ": expected the path of a file, got a folder");
    std::filesystem::create_directories(path_.parent_path(), error);
    std::filesystem::remove(growing_, error);
    file_.emplace(state::FileName{function_, growing_.string()});
  }
  ~ReplacedFile() {
    file_.reset();
    std::error_code ignored;
    std::filesystem::remove(growing_, ignored);
  }
  state::OutputFile& file() { return *file_; }
  void publish() {
    file_->finish();
    TORCH_CHECK(std::rename(growing_.c_str(), path_.c_str()) == 0, function_, ": ", path_.string(),
                ": could not put the file into its place: ", std::strerror(errno));
    state::sync_folder({function_, path_.parent_path().string()});
  }

 private:
  std::string function_;
  std::filesystem::path path_, growing_;
  std::optional<state::OutputFile> file_;
};

/// Names, dtypes and shapes in the order of a file.
std::vector<state::FileEntry> sorted_entries(std::vector<state::FileEntry> entries) {
  std::sort(entries.begin(), entries.end(), state::comes_first);
  return entries;
}

void write_value(state::OutputFile& file, const at::Tensor& value) {
  const auto bytes = value.detach().resolve_conj().resolve_neg().cpu().contiguous();
  file.write(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel()) * bytes.element_size());
}

/// The whole, with rows in the module's own order. Collective if it is distributed.
at::Tensor whole_value(const state::Holding& holding) {
  const auto value = holding.tensor.detach();
  if (!is_dtensor(value)) return value;
  const auto whole = DTensor::of(value).full_tensor();
  const auto pieces = state::whole_pieces(holding.tensor);
  if (pieces.size() < 2) return whole;
  auto ordered = at::empty_like(whole, at::MemoryFormat::Contiguous);
  for (const auto& piece : pieces) {
    const auto rows = piece.box.length[0];
    ordered.narrow(0, piece.box.offset[0], rows).copy_(whole.narrow(0, piece.row, rows));
  }
  return ordered;
}

/// Rank 0 writes what all gather. Whatever fails on it, it gathers on: the others wait for it.
void gather_and_write(const std::string& function, const std::string& path,
                      const std::vector<const state::Holding*>& in_order, const std::string& header,
                      bool writes) {
  std::optional<ReplacedFile> file;
  std::exception_ptr error;
  const auto attempt = [&](const auto& work) {
    if (!writes || error) return;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  };
  attempt([&] {
    file.emplace(function, path);
    file->file().write(header.data(), header.size());
  });
  for (const auto* holding : in_order) {
    const auto value = whole_value(*holding);
    attempt([&] { write_value(file->file(), value); });
  }
  attempt([&] { file->publish(); });
  if (error) std::rethrow_exception(error);
}

}  // namespace

StateDict read_safetensors(const std::string& file) {
  state::StoredFileTensors source("read_safetensors", file);
  StateDict tensors;
  for (const auto& name : source.names())
    tensors.insert(name, state::read_whole(source, *source.find(name)));
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
  ReplacedFile output(kFunction, file);
  output.file().write(header.data(), header.size());
  for (const auto& entry : entries) write_value(output.file(), tensors[entry.name]);
  output.publish();
}

void export_safetensors(const std::string& file, nn::ModuleRef module, Group group) {
  constexpr const char* kFunction = "export_safetensors";
  const c10::AutoGradMode no_grad(false);
  const state::CollectiveSection ranks(std::move(group));
  state::Holdings holdings;
  std::vector<state::FileEntry> entries;
  std::string header;
  ranks.run(kFunction, [&] {
    holdings = state::hold_module(kFunction, *module);
    const auto add = [&](const std::string& name, const state::Holding& holding) {
      entries.push_back(
          {.name = name, .dtype = holding.local.scalar_type(), .shape = holding.shape});
    };
    for (const auto& holding : holdings.tensors) add(holding.name, holding);
    for (const auto& [name, of] : holdings.aliases) {
      for (const auto& holding : holdings.tensors)
        if (holding.name == of) add(name, holding);
    }
    entries = sorted_entries(std::move(entries));
    header = state::layout_file(kFunction, entries);
    return std::string();
  });
  std::map<std::string, const state::Holding*> by_name;
  for (const auto& holding : holdings.tensors) by_name.emplace(holding.name, &holding);
  for (const auto& [name, of] : holdings.aliases) by_name.emplace(name, by_name.at(of));
  std::vector<const state::Holding*> in_order;
  for (const auto& entry : entries) in_order.push_back(by_name.at(entry.name));
  ranks.run(kFunction, [&] {
    gather_and_write(kFunction, file, in_order, header, ranks.rank() == 0);
    return std::string();
  });
}

LoadReport import_safetensors(const std::string& file, nn::ModuleRef module, LoadOptions options) {
  constexpr const char* kFunction = "import_safetensors";
  state::StoredFileTensors source(kFunction, file);
  return state::import_values(kFunction, file, *module, source, options.strict);
}

}  // namespace tessera
