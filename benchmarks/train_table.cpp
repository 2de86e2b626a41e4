#include "train_table.h"

#include <tessera/comm.h>

#include "machine.h"
#include "rank0.h"
#include "statistics.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>

namespace tessera::benchmarks {
namespace {

std::string tokens_per_second(int64_t tokens, double milliseconds) {
  if (tokens == 0) return "";
  return std::to_string(std::llround(1e3 * static_cast<double>(tokens) / milliseconds));
}

/// MiB while warm steps run, and at most: two columns.
std::string columns_of(const std::optional<DeviceMemory>& memory) {
  if (!memory) return ",";
  constexpr int64_t kMebi = 1 << 20;
  return c10::str(memory->steady / kMebi, ",", memory->peak / kMebi);
}

}  // namespace

TrainTable::TrainTable(const std::string& path) {
  on_rank0([&] {
    if (!path.empty()) open(path);
    write_row(
        "job,mode,ranks,tessera_ms,peer,peer_ms,ratio,limit_ms,vs_limit,"
        "tessera_tokens_s,peer_tokens_s,tessera_mib,tessera_peak_mib,peer_mib,"
        "peer_peak_mib");
    return std::string();
  });
}

void TrainTable::open(const std::string& path) {
  rows_.open(path);
  TORCH_CHECK_VALUE(rows_, "bench train: expected to write to ", path,
                    ", but it can't be opened; does its folder exist?");
  bounds_.open(std::filesystem::path(path).replace_extension(".bounds.txt"));
  write_machine_beside(path);
}

void TrainTable::write_row(const std::string& line) {
  std::cout << line << std::endl;
  if (rows_.is_open()) rows_ << line << std::endl;
}

void TrainTable::add(const Comparison& row) {
  if (rank() != 0) return;
  const double ours = median(row.tessera_seconds) * 1e3;
  const double theirs = median(row.peer_seconds) * 1e3;
  const double limit = median(row.limit_seconds) * 1e3;
  char text[256];
  std::snprintf(text, sizeof(text), "%s,%s,%d,%.4f,%s,%.4f,%.3f,%.4f,%.3f", row.job.c_str(),
                row.mode.c_str(), world_size(), ours, row.peer.c_str(), theirs, theirs / ours,
                limit, ours / limit);
  write_row(c10::str(text, ",", tokens_per_second(row.tokens, ours), ",",
                     tokens_per_second(row.tokens, theirs), ",", columns_of(row.tessera_memory),
                     ",", columns_of(row.peer_memory)));
  const auto bounds = c10::str(
      row.job, " ", row.mode, " against ", row.peer, ", medians over ", row.tessera_seconds.size(),
      " pairs: ratio ", describe_median(divide(row.peer_seconds, row.tessera_seconds)),
      ", vs_limit ", describe_median(divide(row.tessera_seconds, row.limit_seconds)));
  std::cerr << bounds << std::endl;
  if (bounds_.is_open()) bounds_ << bounds << std::endl;
}

}  // namespace tessera::benchmarks
