#pragma once

#include <tessera/compile/graph.h>

#include <string>
#include <vector>

namespace tessera::compiler {

constexpr char kKernelName = '@';

/// The function that computes what the body of a fused node says.
///
/// A body holds pointwise operators over tensors of one shape; or, on the host, over lists of
/// tensors ("lanes") whose shapes differ, or one aten::cat of flat tensors and pointwise operators
/// over its result.
struct Kernel {
  std::string operators;       // "relu_mul", for its name
  std::string text;            // the definition, with kKernelName for its name
  std::vector<size_t> inputs;  // inputs of the body that it takes, in order; behind them it takes
                               // all outputs
  size_t outputs = 0;
  int64_t threads = 0;  // on a GPU: as many as have work
  int64_t vector = 1;   // on a GPU: elements that a thread reads at once, see kVectorSuffix
};

/// A second function for tensors that begin at multiples of 16 bytes, where vector > 1.
constexpr const char* kVectorSuffix = "_vector";

Kernel write_kernel(const Graph& body, c10::DeviceType device);
/// Kernel::inputs of the body.
std::vector<size_t> kernel_inputs(const Graph& body);

/// The two targets. Host: a function of C++ that takes `const Host& host, void* const* tensors`.
/// CUDA: a kernel that takes addresses one by one.
std::string write_host_kernel(const Graph& body, const std::vector<std::string>& names,
                              const std::vector<size_t>& inputs);
void write_cuda_kernel(const Graph& body, const std::vector<std::string>& names, Kernel& kernel);

}  // namespace tessera::compiler
