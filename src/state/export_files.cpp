#include "state/export_files.h"

#include <tessera/dtensor.h>

#include "state/collective_section.h"
#include "state/files/json_text.h"
#include "state/files/tensor_files.h"
#include "state/holdings.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <set>
#include <string_view>
#include <vector>

namespace tessera::state {
namespace {

struct PlannedValue {
  const Holding* holding;
  bool is_transposed;
};
struct PlannedFile {
  std::string path;
  std::string header = {};  // all before the values
  std::vector<PlannedValue> values = {};
};

/// A tensor under one of its names.
struct Named {
  FileEntry entry;
  PlannedValue value;
};

/// Rank 0 could not get them: the ranks that have them are not those it would gather from.
void check_all_here(const std::string& function, const Holdings& holdings) {
  for (const auto& holding : holdings.tensors) {
    TORCH_CHECK_VALUE(!is_elsewhere(holding.tensor), function,
                      ": expected a module of which each rank has a part of each tensor, but '",
                      holding.name,
                      "' is on other ranks, as in a pipeline; save() it, load() that into a module "
                      "without a pipeline, and write that one");
  }
}

/// All tensors of the module, in its order.
std::vector<Named> named_tensors(
    const Holdings& holdings, const std::function<bool(const std::string& name)>& is_transposed) {
  std::vector<Named> all;
  std::map<std::string, const Holding*> by_name;
  const auto add = [&](const std::string& name, const Holding& holding) {
    auto shape = holding.shape;
    const bool transposes = is_transposed && shape.size() == 2 && is_transposed(name);
    if (transposes) std::swap(shape[0], shape[1]);
    all.push_back({{.name = name, .dtype = holding.local.scalar_type(), .shape = std::move(shape)},
                   {&holding, transposes}});
  };
  for (const auto& holding : holdings.tensors) {
    by_name.emplace(holding.name, &holding);
    add(holding.name, holding);
  }
  for (const auto& [name, of] : holdings.aliases) add(name, *by_name.at(of));
  return all;
}

PlannedFile plan_file(const std::string& function, const std::string& path,
                      std::vector<Named> tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& left, const auto& right) {
    return comes_first(left.entry, right.entry);
  });
  PlannedFile file{.path = path};
  std::vector<FileEntry> entries;
  for (auto& tensor : tensors) {
    entries.push_back(std::move(tensor.entry));
    file.values.push_back(tensor.value);
  }
  file.header = layout_file(function, entries, metadata);
  return file;
}

/// The whole, with rows in the module's own order. Collective if it is distributed.
at::Tensor whole_value(const Holding& holding) {
  const auto value = holding.tensor.detach();
  if (!is_dtensor(value)) return value;
  const auto whole = DTensor::of(value).full_tensor();
  const auto pieces = whole_pieces(holding.tensor);
  if (pieces.size() < 2) return whole;
  auto ordered = at::empty_like(whole, at::MemoryFormat::Contiguous);
  for (const auto& piece : pieces) {
    const auto rows = piece.box.length[0];
    ordered.narrow(0, piece.box.offset[0], rows).copy_(whole.narrow(0, piece.row, rows));
  }
  return ordered;
}

void remove_file(const std::string& function, const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove(path, error);
  TORCH_CHECK(!error, function, ": ", path.string(),
              ": could not remove what is read in place of the new files: ", error.message());
}

/// Rank 0 writes what all gather. Whatever fails on it, it gathers on: the others wait for it.
/// `superseded` goes before the last file takes its place; empty: nothing does.
void gather_and_write(const std::string& function, const std::vector<PlannedFile>& files,
                      const std::filesystem::path& superseded, bool writes) {
  std::vector<std::unique_ptr<ReplacedFile>> written;
  std::exception_ptr error;
  const auto attempt = [&](const auto& work) {
    if (!writes || error) return;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  };
  for (const auto& file : files) {
    attempt([&] {
      written.push_back(std::make_unique<ReplacedFile>(function, file.path));
      written.back()->file().write(file.header.data(), file.header.size());
    });
    for (const auto& planned : file.values) {
      const auto value = whole_value(*planned.holding);
      attempt(
          [&] { write_value(written.back()->file(), planned.is_transposed ? value.t() : value); });
    }
    attempt([&] { written.back()->file().finish(); });
  }
  attempt([&] {
    for (const auto& file : written) {
      if (file == written.back() && !superseded.empty()) remove_file(function, superseded);
      file->publish();
    }
  });
  if (error) std::rethrow_exception(error);
}

/// In the module's order, as many in a file as fit.
std::vector<std::vector<Named>> split_by_bytes(const std::string& function,
                                               std::vector<Named> tensors, uint64_t max_bytes) {
  std::vector<std::vector<Named>> groups(1);
  uint64_t sum = 0;
  for (auto& tensor : tensors) {
    const auto& entry = tensor.entry;
    const auto bytes = bytes_of({function, entry.name}, entry.shape, entry.dtype, entry.name);
    if (!groups.back().empty() && sum + bytes > max_bytes) {
      groups.emplace_back();
      sum = 0;
    }
    sum += bytes;
    groups.back().push_back(std::move(tensor));
  }
  return groups;
}

std::string numbered_name(size_t number, size_t of) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", number + 1, of);
  return name;
}

/// Whether it is a numbered_name.
bool is_numbered(std::string_view name) {
  const auto take = [&](std::string_view text) {
    if (!name.starts_with(text)) return false;
    name.remove_prefix(text.size());
    return true;
  };
  const auto take_number = [&] {
    const auto digits = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(digits);
    return digits >= 5;
  };
  return take("model-") && take_number() && take("-of-") && take_number() && name == ".safetensors";
}

/// Whether an export makes files of this name.
bool is_export(const std::string& name) {
  return name == kModelName || name == kModelIndexName || is_numbered(name);
}

/// The files of a folder, those that lead a reader to others last.
std::vector<PlannedFile> plan_folder(const std::string& function,
                                     const std::filesystem::path& folder,
                                     std::vector<Named> tensors, const ExportForm& form) {
  auto groups = split_by_bytes(function, std::move(tensors), form.max_file_bytes);
  std::vector<PlannedFile> files;
  Json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", Json::object()}};
  uint64_t total = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto name = groups.size() == 1 ? kModelName : numbered_name(i, groups.size());
    for (const auto& [entry, value] : groups[i]) {
      index["weight_map"][entry.name] = name;
      total += bytes_of({function, name}, entry.shape, entry.dtype, entry.name);
    }
    files.push_back(
        plan_file(function, (folder / name).string(), std::move(groups[i]), form.metadata));
  }
  index["metadata"]["total_size"] = total;
  for (const auto& [name, text] : form.texts)
    files.push_back({.path = (folder / name).string(), .header = text});
  if (groups.size() > 1) {
    files.push_back(
        {.path = (folder / kModelIndexName).string(), .header = to_text(function, index)});
  }
  return files;
}

void remove_other_exports(const std::filesystem::path& folder,
                          const std::vector<PlannedFile>& files) {
  std::set<std::filesystem::path> kept;
  for (const auto& file : files) kept.insert(file.path);
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (is_export(entry.path().filename().string()) && kept.count(entry.path()) == 0)
      std::filesystem::remove(entry.path(), ignored);
  }
}

}  // namespace

ReplacedFile::ReplacedFile(std::string function, const std::string& path)
    : function_(std::move(function)),
      path_(std::filesystem::absolute(path).lexically_normal()),
      growing_(path_.parent_path() / c10::str(".", path_.filename().string(), ".saving")) {
  std::error_code error;
  TORCH_CHECK_VALUE(path_.has_filename() && !std::filesystem::is_directory(path_, error), function_,
                    ": ", path, ": expected the path of a file, got a folder");
  std::filesystem::create_directories(path_.parent_path(), error);
  std::filesystem::remove(growing_, error);
  file_.emplace(FileName{function_, growing_.string()});
}

ReplacedFile::~ReplacedFile() {
  file_.reset();
  std::error_code ignored;
  std::filesystem::remove(growing_, ignored);
}

void ReplacedFile::publish() {
  file_->finish();
  TORCH_CHECK(std::rename(growing_.c_str(), path_.c_str()) == 0, function_, ": ", path_.string(),
              ": could not put the file into its place: ", std::strerror(errno));
  sync_folder({function_, path_.parent_path().string()});
}

void write_value(OutputFile& file, const at::Tensor& value) {
  const auto bytes = value.detach().resolve_conj().resolve_neg().cpu().contiguous();
  file.write(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel()) * bytes.element_size());
}

void export_file(const std::string& function, const std::string& path, torch::nn::Module& module,
                 Group group) {
  const c10::AutoGradMode no_grad(false);
  const CollectiveSection ranks(std::move(group));
  Holdings holdings;
  std::vector<PlannedFile> files;
  ranks.run(function, [&] {
    holdings = hold_module(function, module);
    check_all_here(function, holdings);
    files.push_back(plan_file(function, path, named_tensors(holdings, {}), {}));
    return std::string();
  });
  ranks.run(function, [&] {
    gather_and_write(function, files, /*superseded=*/{}, ranks.rank() == 0);
    return std::string();
  });
}

void export_folder(const std::string& function, const std::string& folder,
                   torch::nn::Module& module, Group group, const ExportForm& form) {
  const c10::AutoGradMode no_grad(false);
  const CollectiveSection ranks(std::move(group));
  std::filesystem::path place;
  Holdings holdings;
  std::vector<PlannedFile> files;
  ranks.run(
      function,
      [&] {
        TORCH_CHECK_VALUE(!folder.empty(), function, ": expected the path of a folder, got none");
        place = std::filesystem::absolute(folder).lexically_normal();
        holdings = form.is_left_out ? hold_values(function, module) : hold_module(function, module);
        check_all_here(function, holdings);
        auto tensors = named_tensors(holdings, form.is_transposed);
        if (form.is_left_out)
          std::erase_if(tensors, [&](const auto& one) { return form.is_left_out(one.entry.name); });
        files = plan_folder(function, place, std::move(tensors), form);
        return std::string();
      },
      folder);
  ranks.run(function, [&] {
    // Readers take a single file before an index.
    const bool has_index = files.back().path.ends_with(kModelIndexName);
    gather_and_write(function, files, has_index ? place / kModelName : "", ranks.rank() == 0);
    if (ranks.rank() == 0) remove_other_exports(place, files);
    return std::string();
  });
}

}  // namespace tessera::state
