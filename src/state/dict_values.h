#pragma once

#include <tessera/fully_shard/state_dict_type.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::state {

/// In what form a module's units want their values in dicts. What no unit has is given as it is.
class StateDictForm {
 public:
  enum class Of { Parameters, OptimizerState };
  /// Throws in the name of `function` if a unit's parameters are whole, or if it can't give what
  /// was asked for.
  StateDictForm(const torch::nn::Module& module, Of of, const char* function);

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
  struct Request {
    StateDictType type;
    bool offload_to_cpu;
    bool is_kept;  // on this rank
  };
  const Request* find(const at::Tensor& parameter) const;

  std::vector<Request> requests_;  // by unit
  std::unordered_map<const at::TensorImpl*, size_t> units_;
};

}  // namespace tessera::state

/// Values of dicts, put where a module's tensors are.
namespace tessera::state {

/// Throws a ValueError in the name of `function` if a distributed value can't be moved to where
/// `target` is: ranks of one would not be ranks of the other.
void check_mesh(const char* function, const std::string& name, const at::Tensor& target,
                const at::Tensor& given);

/// Throws a ValueError if a plain value is given for a parameter whose rows are packed in another
/// order: it does not say in which order its rows are.
void check_packed(const char* function, const std::string& name, const at::Tensor& target,
                  const at::Tensor& given, bool is_local);

/// The value placed as `target` is. A plain one is the whole, on every rank, or, if `is_local`,
/// this rank's part. Collective if it is distributed.
at::Tensor placed_like(const at::Tensor& target, const at::Tensor& given, bool is_local);

}  // namespace tessera::state
