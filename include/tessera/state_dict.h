#pragma once

#include <tessera/nn/services.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

/// Tensors by name, in the order in which they came.
///   for (const auto& [name, tensor] : state_dict(net)) …
class StateDict {
 public:
  using Item = std::pair<std::string, at::Tensor>;

  StateDict() = default;
  StateDict(std::initializer_list<Item> items);

  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  /// Null if there is none of this name.
  const at::Tensor* find(const std::string& name) const;
  at::Tensor* find(const std::string& name);
  /// Throws a ValueError if there is none of this name.
  const at::Tensor& operator[](const std::string& name) const;
  /// Appends an undefined tensor if there is none of this name, to be assigned to.
  at::Tensor& operator[](const std::string& name);
  /// Throws a ValueError if the name is taken.
  void insert(const std::string& name, const at::Tensor& tensor);
  /// Whether there was one of this name.
  bool erase(const std::string& name);

  std::vector<Item>::const_iterator begin() const { return items_.begin(); }
  std::vector<Item>::const_iterator end() const { return items_.end(); }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, size_t> positions_;
};

struct LoadOptions {
  bool strict = true;
};

/// How a dict differs from the module it was loaded into.
struct LoadReport {
  struct Mismatch {
    std::string name;
    std::vector<int64_t> expected;  // the module's shape
    std::vector<int64_t> got;       // the dict's
  };
  std::vector<std::string> missing;     // names of the module that the dict lacks
  std::vector<std::string> unexpected;  // names of the dict that the module lacks
  std::vector<Mismatch> mismatched;

  bool empty() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

/// Parameters and persistent buffers by the names and in the order Python gives them. The tensors
/// share the module's memory and are detached from autograd.
StateDict state_dict(nn::ModuleRef module);

/// Copies the dict's tensors into the module's, converting dtype and device. Strict: if names or
/// shapes differ, one error lists all that do and nothing is changed. Otherwise loads what fits.
LoadReport load_state_dict(nn::ModuleRef module, const StateDict& dict, LoadOptions options = {});

}  // namespace tessera
