#pragma once

#include <tessera/fully_shard/state_dict_type.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::state {

/// In what form a module's units want their values in dicts. What no unit has is given as it is.
class Presentation {
 public:
  enum class Of { Parameters, OptimizerState };
  /// Throws in the name of `function` if a unit's parameters are whole, or if it can't give what
  /// was asked for.
  Presentation(const torch::nn::Module& module, Of of, const char* function);

  /// `value`, which is placed as `parameter` is (it may be the parameter), as dicts show it.
  /// Undefined if this rank gets none. Collective for FULL_STATE_DICT. Call it without gradients.
  at::Tensor show(const at::Tensor& parameter, const at::Tensor& value) const;
  /// rank0_only: this rank's dict stays empty.
  bool is_empty_here() const;

  /// Whether plain values of dicts are this rank's part of the parameter.
  bool is_local(const at::Tensor& parameter) const;
  /// The shape of plain values for the parameter.
  std::vector<int64_t> plain_sizes(const at::Tensor& parameter) const;

 private:
  struct Wish {
    StateDictType type;
    bool offload_to_cpu;
    bool is_kept;  // on this rank
  };
  const Wish* find(const at::Tensor& parameter) const;

  std::vector<Wish> wishes_;  // by unit
  std::unordered_map<const at::TensorImpl*, size_t> units_;
};

}  // namespace tessera::state
