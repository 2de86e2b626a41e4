#pragma once

#include "jobs.h"

#include <string>
#include <vector>

namespace tessera::benchmarks {

/// eager, replicate, …, replicate+compile; "eager", "compile": ranks that train apart.
std::vector<std::string> mode_names(c10::DeviceType device);
/// Whether the step is compiled, and the mode in which it is not.
bool is_compiled(const std::string& mode);
std::string eager_mode(const std::string& mode);
/// Whether linear layers multiply in 8 bits, which peers train in bf16.
bool is_fp8(const std::string& mode);
/// What peers in Python take for it.
std::string peer_mode(const std::string& mode);

/// Whose batch this rank trains on: its own, or, where all ranks work on one, that of rank 0.
int batch_rank(const std::string& mode);
/// How many ranks have a batch of their own: all, or one.
int ranks_with_batches(const std::string& mode);

/// Makes all ranks train the job together, Tessera's way. Every rank calls it.
void parallelise(Job& job, const std::string& mode);

/// The same with libtorch's own engine behind DistributedDataParallel, c10d::Reducer, as Python
/// sets it up by default, over a group of this backend.
void parallelise_with_reducer(Job& job, const std::string& backend);

}  // namespace tessera::benchmarks
