#pragma once

#include <tessera/optim.h>

#include <optional>
#include <vector>

namespace tessera::optim {

enum class Kernels { Loop /* one parameter after the other */, Foreach, Fused };

/// What the options of a group ask of a plan. Bit i of `kept`: the rule's state i is kept.
struct Demand {
  std::optional<bool> foreach;
  std::optional<bool> fused;
  unsigned kept = 0;
  std::optional<at::ScalarType> state_dtype = std::nullopt;  // of state that is made

  bool operator==(const Demand&) const = default;
};

/// Parameters of one group with gradients that share device, dtype and layout of the gradients, and
/// their state, as the lists that kernels take.
struct ParamBucket {
  Kernels kernels = Kernels::Loop;
  bool sparse = false;  // gradients
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;               // during a step alone: nobody else keeps them alive
  std::vector<std::vector<at::Tensor>> state;  // [the rule's name][parameter]; may be undefined
  std::vector<State*> owners;                  // of `state`, by parameter
};

/// Whether the tensor is one of libtorch's own on a device whose list kernels beat a loop.
bool on_accelerator(const at::Tensor& tensor);
/// Whether list kernels see the tensor's memory: not so for a tensor subclass by dispatch key.
bool is_plain(const at::Tensor& tensor);

/// The buckets of one parameter group. Kept between steps as long as the same parameters, as they
/// were, have gradients: then a step costs a comparison per parameter and allocates nothing.
class GroupPlan {
 public:
  /// Puts the gradients into the buckets; false, and nothing done, if the plan does not fit.
  bool collect(const std::vector<at::Tensor>& params, const Demand& demand, size_t state_count);
  /// Makes the buckets anew; state is made and found by the optimizer.
  void build(const std::vector<at::Tensor>& params, const Demand& demand,
             const Optimizer::Rule& rule,
             ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& state);
  void release_grads();
  void clear();

  std::vector<ParamBucket>& buckets() { return buckets_; }

 private:
  static constexpr int kNoGrad = -1;
  struct Member {
    const c10::TensorImpl* param;
    int bucket;
    at::ScalarType dtype;
    c10::Device device;
  };
  int bucket_for(const at::Tensor& param, bool sparse, Kernels kernels, size_t state_names);

  bool built_ = false;
  Demand demand_;
  size_t state_count_ = 0;
  std::vector<Member> members_;
  std::vector<ParamBucket> buckets_;
};

}  // namespace tessera::optim
