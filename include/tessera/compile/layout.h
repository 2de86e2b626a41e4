#pragma once

#include <tessera/compile/graph.h>

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A program as it is run, for a reader: instructions in order, the kernels they call, and how long
/// memory is used. `tessera inspect --program` draws it.
struct ProgramLayout {
  /// Memory that the program is given, or allocates.
  struct Buffer {
    std::string name;   // of the first value in it
    std::string type;   // "float32[8, 3]"
    std::string kind;   // as name_of(InputKind), or "result", "gradient", "written", "temporary"
    std::string label;  // of an input: what the user calls it
    bool is_input = false;
    int64_t bytes = 0;
    /// The instruction that makes it, and the last one that needs it; the number of instructions if
    /// it is kept to the end. Inputs are there from 0 to the end.
    size_t first = 0, last = 0;
  };
  struct Kernel {
    std::string name;    // "cpp_fused_relu_mul_0"
    std::string source;  // its definition; what all share is part of generated_code() alone
    c10::Device device = c10::kCPU;
    size_t uses = 0;  // instructions that call it
  };
  struct Instruction {
    std::string text;                    // "loss = aten.mse_loss.default(x, y)  // float32[]"
    std::string op;                      // "aten::mse_loss", "tessera::fused"
    std::string module;                  // whose forward called it, "" if unknown
    std::optional<size_t> kernel = {};   // of ours, in `kernels`
    std::vector<std::string> operators;  // that the kernel computes, in order
    bool sends = false;                  // to other ranks
    std::vector<size_t> reads, writes;   // buffers, each once
    int64_t moved = 0;                   // bytes read and written if every element is touched once
    int64_t held = 0;                    // bytes of buffers that are no inputs, while it runs
  };
  std::vector<Buffer> buffers;  // inputs first, then in order of their first instruction
  std::vector<Kernel> kernels;
  std::vector<Instruction> instructions;
  std::vector<std::string> outputs;  // "return loss", "weight.grad = t"
  std::vector<std::string> devices;  // on which it has tensors
  size_t peak = 0;                   // the instruction during which `held` is largest
  int64_t peak_bytes = 0;
  int64_t input_bytes = 0;
};

/// Of a graph as passes left it (program_graph(), or the last file of CompileOptions::dump_folder);
/// of one without kernels they are simply none. What operators allocate for themselves is not
/// known. Throws a ValueError if it is not well-formed, or has kernels that can't be written.
ProgramLayout layout_of(const Graph& program);

}  // namespace tessera
