#pragma once

#include <chrono>
#include <filesystem>
#include <string>

namespace tessera::testing {

/// A one-time event with a name, shared by the ranks of a run and its parent: somebody signals it,
/// any number wait for it, before or after. Tests wait for "rank 1 has reached the loop" by this
/// instead of sleeping. A name per rank makes an event per rank: Beacon("reached." +
/// std::to_string(rank())).
class Beacon {
 public:
  /// Inside the body of run_processes or run_threads. The parent asks RankProcesses::beacon(name).
  explicit Beacon(const std::string& name);
  Beacon(const std::filesystem::path& folder, const std::string& name);

  void signal() const;
  bool signalled() const;
  /// False: not signalled within `timeout`.
  [[nodiscard]] bool wait(std::chrono::milliseconds timeout = std::chrono::seconds(30)) const;

 private:
  std::filesystem::path
      file_;  // its existence is the event; empty: counts as signalled (see RankProcesses)
};

}  // namespace tessera::testing
