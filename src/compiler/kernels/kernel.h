#pragma once

#include <tessera/compile/graph.h>

#include <string>
#include <vector>

namespace tessera::compiler {

constexpr char kKernelName = '@';

/// The function that computes what the body of a fused node says.
///
/// A body holds pointwise operators over tensors of one shape, and reductions of its rows and
/// columns (Note [rows]); or, on the host, over lists of tensors ("lanes") whose shapes differ, or
/// one aten::cat of flat tensors and pointwise operators over its result.
struct Kernel {
  /// On a GPU.
  struct Grid {
    int64_t blocks = 0, threads = 0;
    int64_t shared = 0;  // bytes beyond its own that a block has where the GPU has them
  };
  std::string operators;       // "relu_mul", for its name
  std::string text;            // the definition, with kKernelName for its name
  std::vector<size_t> inputs;  // inputs of the body that it takes, in order; behind them it takes
                               // all outputs
  size_t outputs = 0;
  Grid grid = {};
  int64_t vector = 1;  // on a GPU: elements that a thread reads at once, see kVectorSuffix
  Grid vector_grid = {};
  bool takes_list = false;  // on a GPU: all addresses as one parameter
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
/// The same of bodies that have_rows().
std::string write_host_rows(const Graph& body, const std::vector<std::string>& names,
                            const std::vector<size_t>& inputs);
void write_cuda_rows(const Graph& body, const std::vector<std::string>& names, Kernel& kernel);
/// Of a body that is one such node, see is_list_kernel.
void write_cuda_sum_parts(const Graph& body, Kernel& kernel);
void write_cuda_casts(const Graph& body, Kernel& kernel);

/// As many elements as ATen gives to one thread of the host at least.
constexpr int64_t kGrain = 32768;
/// How a function of the host begins: its parameters, and names for the tensors that it is given:
/// in0, in1 …, out0 ….
std::string host_head(const Graph& body, const std::vector<size_t>& inputs);

}  // namespace tessera::compiler
