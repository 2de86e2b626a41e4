#pragma once

#include <fstream>
#include <functional>
#include <string>

namespace tessera::benchmarks {

/// A table of comma-separated lines: on standard output and, if `path` is not empty, in a file with
/// the machine's description beside it. `question` is the benchmark's name, for errors.
class Table {
 public:
  Table(const std::string& question, const std::string& path);
  void add(const std::string& line);

 private:
  std::ofstream file_;
};

/// Runs a benchmark with one thread. An error becomes a line that names the question, and 1.
int run_question(const std::string& question, const std::function<void()>& run);

/// Whether `tessera run` has started this program as a rank other than the first: for benchmarks
/// that only one process must run.
bool is_other_rank();

}  // namespace tessera::benchmarks
