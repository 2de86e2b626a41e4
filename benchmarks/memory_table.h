#pragma once

#include "memory_sides.h"

#include <fstream>
#include <string>
#include <vector>

namespace tessera::benchmarks {

struct MemoryRow {
  MemoryJob job;
  std::string mode;
  MemoryUse use;
  size_t bound_bytes;                // 0: none
  std::vector<double> seconds = {};  // empty if its steps are not timed
};

/// Rows go to standard output and to the file. Only rank 0 writes; every rank calls.
class MemoryTable {
 public:
  explicit MemoryTable(const std::string& path);
  /// `plain`: the seconds of plain steps; entries of equal index were measured side by side.
  void add(const MemoryRow& row, const std::vector<double>& plain);

 private:
  void write_row(const std::string& line);

  std::ofstream rows_;
};

}  // namespace tessera::benchmarks
