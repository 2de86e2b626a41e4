#pragma once

#include "train_sides.h"

#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// One row: seconds per step of each side, block by block; entries of equal index were measured
/// next to each other.
struct Comparison {
  std::string job;
  std::string mode;
  std::string peer;
  int64_t tokens = 0;  // that a step of all ranks takes; 0: the job has none
  std::vector<double> tessera_seconds = {};
  std::vector<double> peer_seconds = {};
  std::vector<double> limit_seconds = {};  // our step without the parallel function
  std::optional<DeviceMemory> tessera_memory = {}, peer_memory = {};
};

/// Rows go to standard output and to the file, bounds of the ratios to standard error and to
/// FILE.bounds.txt. Only rank 0 writes; every rank calls.
class TrainTable {
 public:
  explicit TrainTable(const std::string& path);
  void add(const Comparison& comparison);

 private:
  void open(const std::string& path);
  void write_row(const std::string& line);

  std::ofstream rows_;
  std::ofstream bounds_;
};

}  // namespace tessera::benchmarks
