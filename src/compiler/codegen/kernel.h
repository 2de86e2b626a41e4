#pragma once

#include <tessera/compile/graph.h>

#include <string>
#include <vector>

namespace tessera::compiler {

constexpr char kKernelName = '@';

/// The function that computes what the body of a fused node says.
///
/// A body holds pointwise operators over tensors of one shape; or over lists of tensors ("lanes"),
/// whose shapes differ; or one aten::cat of flat tensors and pointwise operators over its result.
struct Kernel {
  std::string operators;       // "relu_mul", for its name
  std::string text;            // the definition, with kKernelName for its name
  std::vector<size_t> inputs;  // inputs of the body that it takes, in order; behind them it takes
                               // all scalars, then all outputs
};

Kernel write_kernel(const Graph& body);

/// The lanes of a body; those of a cat are its inputs.
size_t kernel_lanes(const Graph& body);
/// The inputs of the body that a lane reads, in their order.
std::vector<ValueId> lane_reads(const Graph& body, size_t lane);

}  // namespace tessera::compiler
