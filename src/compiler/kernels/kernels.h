#pragma once

#include "compiler/kernels/kernel.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

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
