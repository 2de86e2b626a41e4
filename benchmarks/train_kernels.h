#pragma once

#include "train_sides.h"

#include <string>
#include <vector>

namespace tessera::benchmarks {

/// "vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>" of what a profiler calls a kernel:
/// without result, arguments and namespaces, at most so long that a line holds it.
std::string short_kernel_name(const std::string& name);

/// Counts and times of both sides by kernel, one line each: first those that one side launches more
/// often, then the others, the longest first.
std::string kernel_table(const std::vector<Kernel>& ours, const std::vector<Kernel>& theirs,
                         const std::string& peer);

/// To standard output and, where this folder has one, to benchmarks/results/DATE-kernels-WHAT.txt.
/// Rank 0 alone calls it.
void write_kernels(const std::string& what, const std::string& table);

}  // namespace tessera::benchmarks
