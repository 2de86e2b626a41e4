#pragma once

#include <tessera/nn/services.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

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
  const at::Tensor& operator[](const std::string& name) const&;
  at::Tensor operator[](const std::string& name) &&;  // state_dict(net)["weight"]
  /// Appends an undefined tensor if there is none of this name, to be assigned to.
  at::Tensor& operator[](const std::string& name) &;
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
/// share the module's memory and are detached from autograd; those of a tensor parallel module are
/// DTensors. Parameters of fully sharded units in the module come as set_state_dict_type says: by
/// default gathered, one after the other, as whole copies, so every rank has to call it. Not inside
/// of a unit's forward or backward, nor after unshard().
StateDict state_dict(nn::ModuleRef module);

/// Copies the dict's tensors into the module's, converting dtype and device. Strict: if names or
/// shapes differ, one error lists all that do and nothing is changed. Otherwise loads what fits.
/// Distributed parameters take whole plain values, of which each rank cuts its part, and
/// distributed ones, wherever they are placed on the same ranks; then it is collective. Units of
/// LOCAL_STATE_DICT take plain values as this rank's part.
LoadReport load_state_dict(nn::ModuleRef module, const StateDict& dict, LoadOptions options = {});

/// What an optimizer keeps, by the names of parameters.
struct OptimizerStateDict {
  struct Group {
    std::vector<std::string> params;             // names
    std::map<std::string, c10::IValue> options;  // "lr", …, as torch::save writes them
  };
  std::map<std::string, std::map<std::string, at::Tensor>> state;  // of a parameter: "exp_avg", …
  std::vector<Group> param_groups;
  std::string kind;  // the optimizer's class, "AdamW"; empty: any

  bool empty() const { return state.empty() && param_groups.empty(); }
};

/// Options and state of an optimizer of parameters of the module: of tessera::optim, or
/// torch::optim's SGD, Adam, AdamW, RMSprop or Adagrad. State of units' parameters comes as
/// set_state_dict_type says, as for state_dict; counts of steps are plain copies; all else shares
/// the optimizer's memory.
OptimizerStateDict optimizer_state_dict(nn::ModuleRef module,
                                        const torch::optim::Optimizer& optimizer);

/// Loads what the same kind of optimizer gave, of tessera::optim or torch::optim, on any number of
/// ranks, sharded or not. Names have to be the optimizer's, and each of its groups within one of
/// the dict's; otherwise a ValueError says what differs and nothing is changed. Values as in
/// load_state_dict. Parameters that the dict has no state for start anew. Of a dict of
/// torch::optim's, `foreach` and `fused` stay as they are.
void load_optimizer_state_dict(nn::ModuleRef module, torch::optim::Optimizer& optimizer,
                               const OptimizerStateDict& dict);

}  // namespace tessera
