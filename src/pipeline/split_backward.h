#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

/// Backward in two parts: what the stage before waits for, and the gradients of parameters.
namespace tessera::detail::pipeline {

// Note [split backward]
// Nodes of the graph between output and input are run by the first part; those of them from which
// parameters branch off, such as a Linear's, are the borders. The first part keeps the gradients
// that come to the borders, and computes no gradient of a parameter, since the engine asks each
// node only for what the input needs. Then the borders' edges towards the input are cut off the
// graph, which is this microbatch's alone, and the second part starts at all of them at once. So
// every product is computed once, and what only the first part needed is freed after it.
class SplitBackward {
 public:
  /// The first part: the gradient of `input`, a leaf that requires grad; undefined if `output` does
  /// not depend on it.
  at::Tensor backward_input(const at::Tensor& output, const at::Tensor& gradient,
                            const at::Tensor& input);
  /// The second: adds to .grad of parameters, and frees the graph.
  void backward_weight();

 private:
  torch::autograd::edge_list borders_;
  std::vector<at::Tensor> gradients_;
};

}  // namespace tessera::detail::pipeline
