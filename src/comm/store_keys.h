#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace tessera::comm {

/// Every rank's `value` by rank. Blocks until all `size` ranks have called it with the same
/// `topic`, at most `timeout`; the error names `caller` and the ranks that are missing.
std::vector<std::string> exchange(c10d::Store& store, const std::string& topic, int rank, int size,
                                  const std::string& value, std::chrono::milliseconds timeout,
                                  const std::string& caller);

}  // namespace tessera::comm
