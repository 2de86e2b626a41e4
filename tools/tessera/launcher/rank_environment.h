#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launcher {

/// One variable of a process's environment.
struct Setting {
  std::string name;
  std::string value;
};

/// "NAME=VALUE" as a setting. Throws std::invalid_argument for anything else, and for the variables
/// that tell a rank who it is: those are the launcher's to set.
Setting parse_setting(std::string_view text);

/// What one rank is told about itself and the job.
struct RankIdentity {
  int rank = 0;
  int world_size = 1;
  int restart_count = 0;
  std::string store;                            // "unix://@NAME"
  std::chrono::milliseconds stopped_timeout{};  // 0: none
  int listen_fd = -1;  // rank 0: the socket that listens there; the others: none
};

/// The environment of a rank, as execve takes it: `inherited`, `settings` over it, and the rank's
/// identity over both. OMP_NUM_THREADS gets the rank's share of `cores` unless it is set already.
std::vector<std::string> rank_environment(const char* const* inherited,
                                          const std::vector<Setting>& settings,
                                          const RankIdentity& identity, unsigned cores);

}  // namespace tessera::launcher
