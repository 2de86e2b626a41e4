#include "memory_table.h"

#include <tessera/comm.h>

#include "machine.h"
#include "rank0.h"
#include "statistics.h"

#include <cstdio>
#include <iostream>

namespace tessera::benchmarks {

MemoryTable::MemoryTable(const std::string& path) {
  on_rank0([&] {
    if (!path.empty()) {
      rows_.open(path);
      TORCH_CHECK_VALUE(rows_, "bench memory: expected to write to ", path,
                        ", but it can't be opened; does its folder exist?");
      write_machine_beside(path);
    }
    write_row("job,mode,ranks,blocks,steady_bytes,peak_bytes,bound_bytes,step_ms,vs_plain");
    return std::string();
  });
}

void MemoryTable::write_row(const std::string& line) {
  std::cout << line << std::endl;
  if (rows_.is_open()) rows_ << line << std::endl;
}

void MemoryTable::add(const MemoryRow& row, const std::vector<double>& plain) {
  if (rank() != 0) return;
  const bool is_timed = !row.seconds.empty();
  char times[64] = ",";
  if (is_timed)
    std::snprintf(times, sizeof(times), "%.3f,%.3f", median(row.seconds) * 1e3,
                  median(row.seconds) / median(plain));
  write_row(c10::str(row.job.label(), ",", row.mode, ",", world_size(), ",", row.job.blocks, ",",
                     row.use.steady_bytes, ",", row.use.peak_bytes, ",",
                     row.bound_bytes > 0 ? std::to_string(row.bound_bytes) : "", ",", times));
  if (!is_timed) return;
  std::cerr << row.job.label() << " " << row.mode << ", median over " << plain.size()
            << " pairs: vs_plain " << describe_median(divide(row.seconds, plain)) << std::endl;
}

}  // namespace tessera::benchmarks
