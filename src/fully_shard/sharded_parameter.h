#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::detail::fully_shard {

// Note [sharded parameters]
// A parameter is one TensorImpl, held by the module's member, its parameter list and optimizers, so
// it can't be exchanged, only changed. It has two forms: sharded, outside of computation, a
// distributed tensor whose local part is this rank's shard; and unsharded, inside, a plain tensor.
// A form is a tensor of its own from which sizes, dtype, memory and dispatch keys are copied;
// identity, gradient and version counter stay the parameter's. What autograd saved during forward
// is the parameter, or views of the memory of its unsharded form: both are right again when
// backward unshards it and that memory is filled.

/// A parameter that is sharded outside of computation and unsharded inside.
class ShardedParameter {
 public:
  /// Shows neither yet: the caller calls to_sharded().
  ShardedParameter(at::Tensor parameter, at::Tensor sharded, at::Tensor unsharded);

  const at::Tensor& parameter() const { return parameter_; }
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& unsharded() const { return unsharded_; }

  void to_sharded();
  void to_unsharded();
  /// Another unsharded form, while the parameter is sharded.
  void set_unsharded(at::Tensor unsharded);
  /// A plain copy of the unsharded values, while it is sharded, and back.
  void show_copy(const at::Tensor& copy);
  void end_copy();
  /// Inside a backward: whether the gradient that comes is that of the sharded form.
  bool is_sharded_reached() const;
  /// Whether a graph made of a copy that was shown is still there.
  bool is_copy_in_graph() const;
  /// While it is sharded: whether somebody has put other memory or another dtype there.
  bool was_sharded_exchanged() const;
  /// Whether somebody wrote to the parameter since to_unsharded().
  bool was_unsharded_written() const { return parameter_._version() != unsharded_version_; }

 private:
  void show(const at::Tensor& form);

  at::Tensor parameter_;
  at::Tensor sharded_;
  at::Tensor unsharded_;
  bool is_unsharded_ = false;
  int64_t unsharded_version_ = 0;
  // Of the form that is not shown: gradients of the two are of different kinds, so each has an
  // accumulator of its own.
  decltype(torch::autograd::AutogradMeta::grad_accumulator_) hidden_accumulator_;
  decltype(hidden_accumulator_) sharded_accumulator_;  // while a copy is shown
  decltype(hidden_accumulator_) copy_accumulator_;     // of the last copy
};

/// How a parameter is placed outside of computation: one of its dimensions over the last dimension
/// of `mesh`, copies over one before it; a tensor parallel one on the mesh that has the dimensions
/// of both. `shard_dim`: none if every rank keeps all of it.
dtensor::SpecPtr sharded_spec(const at::Tensor& parameter, const std::string& name,
                              const DeviceMesh& mesh, std::optional<int64_t> shard_dim);

}  // namespace tessera::detail::fully_shard
