#pragma once

#include <tessera/state_dict.h>

#include "state/files/stored_checkpoint.h"
#include "state/holdings.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

/// Values from disk, placed as a module's tensors are.
namespace tessera::state {

/// This rank's part of a stored tensor, in the file's dtype: distributed as `holding.tensor` is, or
/// plain. Reads what it needs alone.
at::Tensor read_part_of(TensorSource& source, const StoredTensor& tensor, const Holding& holding);
/// All of it.
at::Tensor read_whole(TensorSource& source, const StoredTensor& tensor);

/// How what is stored differs from a module.
struct Differences {
  LoadReport report;
  std::vector<std::string> other_dtype;  // "name (expected …, got …)"

  bool empty() const { return report.empty() && other_dtype.empty(); }
  /// "; missing: 'a'; unexpected: 'b'".
  std::string to_string() const;
};

/// What is read for a module before any of it is given to it.
class ModuleValues {
 public:
  /// Compares. Values of other dtypes are a difference, or converted.
  ModuleValues(const std::string& function, const torch::nn::Module& module,
               const TensorSource& source, bool converts);

  const Differences& differences() const { return differences_; }
  /// Whether the module's tensor of this name gets a value.
  bool fits(const std::string& name) const;
  void read(TensorSource& source);
  /// Gives the module its values.
  void apply() const;

 private:
  void compare(const Holding& holding, const std::string& name, const TensorSource& source,
               bool converts);

  Holdings holdings_;
  Differences differences_;
  std::vector<std::pair<const Holding*, const StoredTensor*>> fitting_;
  std::vector<at::Tensor> values_;
};

/// A foreign file of a whole model into `module`, in the module's dtypes; with `strict` nothing is
/// loaded if names or shapes differ.
LoadReport import_values(const std::string& function, const std::string& file,
                         torch::nn::Module& module, TensorSource& source, bool strict);

}  // namespace tessera::state
