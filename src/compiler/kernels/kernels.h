#pragma once

#include <tessera/compile/graph.h>

#include <functional>
#include <optional>
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

/// From fused nodes to functions that can be called:
///
///   Graph ──write_kernels──> KernelSources ──load_kernels──> a Launch per node
///                             host: C++, by the machine's compiler (host_library)
///                             CUDA: CUDA C, by NVRTC (nvrtc)
namespace tessera::compiler {

/// The kernels of a graph's fused nodes. Equal kernels are one.
struct KernelSources {
  struct Use {
    std::string name;  // "cpp_fused_relu_mul_0"
    Kernel kernel;     // without its text
    size_t source;     // in `sources`
    size_t begin;      // of its definition in that one's
    size_t end;
  };
  struct Source {
    c10::Device device;
    std::string definitions = {};

    /// What is compiled.
    std::string text() const;
  };
  std::vector<std::optional<Use>> uses;  // by node; none for operators
  std::vector<Source> sources;           // one per device

  /// All that is compiled, for a reader.
  std::string text() const;
  /// How many kernels that is.
  int64_t distinct() const;
  std::string definition(const Use& use) const {
    return sources.at(use.source).definitions.substr(use.begin, use.end - use.begin);
  }
};
KernelSources write_kernels(const Graph& graph);

/// Runs a kernel: on the host it has run when it returns, on a GPU it is queued on the current
/// stream. `tensors`: addresses of what it reads (Kernel::inputs), then of what it writes.
using Launch = std::function<void(void* const* tensors)>;

/// By node; empty for operators. None: `why_not`.
std::optional<std::vector<Launch>> load_kernels(const KernelSources& kernels, std::string* why_not);

}  // namespace tessera::compiler
