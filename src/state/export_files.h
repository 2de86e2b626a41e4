#pragma once

#include <tessera/comm.h>
#include <tessera/nn/module_ref.h>

#include "state/files/disk.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

/// Whole models into files for others.
namespace tessera::state {

/// A file that takes the place of an older one when it is complete.
class ReplacedFile {
 public:
  ReplacedFile(std::string function, const std::string& path);
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  OutputFile& file() { return *file_; }
  void publish();

 private:
  std::string function_;
  std::filesystem::path path_, growing_;
  std::optional<OutputFile> file_;
};

/// Into one safetensors file, with all names of tensors that have several. Collective.
void export_file(const std::string& function, const std::string& path, torch::nn::Module& module,
                 Group group);

struct ExportForm {
  /// The values of these, matrices, are written with rows as columns.
  std::function<bool(const std::string& name)> is_transposed;
  /// Of the tensors in a file; one that is larger has a file of its own.
  uint64_t max_file_bytes = 0;
  std::map<std::string, std::string> metadata = {};               // of each file
  std::map<std::string, std::string> texts = {};                  // further files: name -> content
  std::function<bool(const std::string& name)> is_left_out = {};  // empty: nothing is
};

/// Into `folder`, which is made: model.safetensors, or several files and an index, which replace
/// those that an earlier export left there. All files take their places when all are complete.
/// Collective.
void export_folder(const std::string& function, const std::string& folder,
                   torch::nn::Module& module, Group group, const ExportForm& form);

/// Writes what a tensor holds, row-major.
void write_value(OutputFile& file, const at::Tensor& value);

}  // namespace tessera::state
