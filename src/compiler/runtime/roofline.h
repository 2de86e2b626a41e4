#pragma once

#include <tessera/compile/graph.h>

#include "compiler/kernels/kernels.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// Note [roofline]
// Fused kernels are bound by memory: what they could take at best is the bytes that they must move,
// divided by what the memory moves. Each is run by itself, on tensors of its own with the sizes and
// strides of the program, with caches full of something else, so that bytes come from memory; the
// fastest of a few runs counts. What memory moves is measured by a copy, once for each device. In a
// step a kernel may find what it reads in a cache: then it is faster than here. One that computes
// much, or that is too small to fill the device, is far from its roof.

struct KernelTime {
  std::string name;
  c10::Device device = c10::kCPU;
  size_t calls = 0;       // in the program
  int64_t bytes = 0;      // that a call must move
  double seconds = 0;     // of a call
  double peak_bytes = 0;  // per second, of the device's memory

  double share() const { return static_cast<double>(bytes) / (seconds * peak_bytes); }
};

/// Of each distinct kernel; those that take most of the program first. `kernels`: by node.
std::vector<KernelTime> time_kernels(const Graph& graph, const std::vector<Launch>& kernels);

/// One line for each, and one for all. Empty if there are none.
std::string roofline_text(const std::vector<KernelTime>& times);

}  // namespace tessera::compiler
