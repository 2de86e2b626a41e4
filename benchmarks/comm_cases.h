#pragma once

#include <tessera/comm.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// One collective on one group, ready to run again and again.
struct CommCase {
  std::function<void()> run;
  /// Sets the inputs, runs once and compares with what one process computes; throws if it differs.
  std::function<void()> check;
};

/// `bytes`: of the larger side (all_gather's output, reduce_scatter's input). Tensors are on
/// `device`; shared: on the CPU, in shared memory. On a GPU `run` may return before the device is
/// done.
CommCase make_case(const std::string& op, c10::ScalarType dtype, int64_t bytes, const Group& group,
                   c10::Device device, bool shared);

/// all_reduce, all_gather_into_tensor, ...
const std::vector<std::string>& comm_ops();

}  // namespace tessera::benchmarks
