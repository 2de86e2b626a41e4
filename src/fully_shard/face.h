#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::sharded {

// Note [two faces]
// A parameter is one TensorImpl, held by the module's member, its parameter list and optimizers, so
// it can't be exchanged, only changed. It shows one of two faces: outside of computation a
// distributed tensor whose local part is this rank's shard, inside a plain whole tensor. A face is
// a tensor of its own from which sizes, dtype, memory and dispatch keys are copied; identity,
// gradient and version counter stay the parameter's. What autograd saved during forward is the
// parameter, or views of the memory of its inner face: both are right again when backward shows
// that face and its memory is filled.

/// A parameter with two faces.
class TwoFaced {
 public:
  /// Shows neither yet: the caller calls show_outside().
  TwoFaced(at::Tensor parameter, at::Tensor outside, at::Tensor inside);

  const at::Tensor& parameter() const { return parameter_; }
  const at::Tensor& outside() const { return outside_; }
  const at::Tensor& inside() const { return inside_; }

  void show_outside();
  void show_inside();
  /// Another inner face, while the outer one is shown.
  void set_inside(at::Tensor inside);
  /// A plain whole tensor, from the outer face and back to it.
  void show_copy(const at::Tensor& copy);
  void end_copy();
  /// Inside a backward: whether the gradient that comes is that of the outer face.
  bool is_reached_outside() const;
  /// Whether a graph made of a copy that was shown is still there.
  bool is_copy_in_graph() const;
  /// While the outer face is shown: whether somebody has put other memory or another dtype there.
  bool was_exchanged_outside() const;
  /// Whether somebody wrote to the parameter since show_inside().
  bool was_written_inside() const { return parameter_._version() != version_inside_; }

 private:
  void show(const at::Tensor& face);

  at::Tensor parameter_;
  at::Tensor outside_;
  at::Tensor inside_;
  bool is_inside_ = false;
  int64_t version_inside_ = 0;
  // Of the face that is not shown: gradients of the two are of different kinds, so each has an
  // accumulator of its own.
  decltype(torch::autograd::AutogradMeta::grad_accumulator_) hidden_accumulator_;
  decltype(hidden_accumulator_) outer_accumulator_;  // while a copy is shown
  decltype(hidden_accumulator_) copy_accumulator_;   // of the last copy
};

}  // namespace tessera::sharded
