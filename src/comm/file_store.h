#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace tessera::comm {

/// Opens the store in the file at `path` for `rank`. The file is there as long as a process that
/// has opened it lives, and goes with the last one. See Note [file stores].
c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int rank, int world_size);

}  // namespace tessera::comm
