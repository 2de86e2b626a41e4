#pragma once

#include "launcher/descriptor.h"
#include "launcher/signal_inbox.h"

#include <sys/types.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::launcher {

/// The program could not be executed: no rank ever ran it.
class StartError : public std::runtime_error {
 public:
  StartError(const std::string& message, int exit_code)
      : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }  // 127 not found, 126 not executable, as in a shell

 private:
  int exit_code_;
};

struct RankStart {
  const std::vector<std::string>&
      command;  // the program, by path or by name on PATH, and its words
  const std::vector<std::string>& environment;  // "NAME=VALUE"
  int stdin_fd;
  int kept_fd = -1;  // one more descriptor that the rank inherits under its number
  int watcher_fd;
  const SignalInbox& signals;
};

/// A started rank: the leader of a process group of its own. Once it has ended it is to stay a
/// zombie (see end_of) for as long as the group is signalled: that keeps the number from others.
struct RankProcess {
  pid_t pid = -1;
  Descriptor pidfd;
  Descriptor out;  // the reading ends of its pipes
  Descriptor err;
};

/// Returns once the program runs. Throws StartError if it cannot be executed, and std::system_error
/// if no process can be made.
RankProcess start_rank(const RankStart& start);

/// Whether the process is stopped: by a signal ('T') or by a debugger ('t').
enum class Stop { None, BySignal, ByDebugger };
Stop stop_of(pid_t pid);

/// How a rank that has ended did so.
struct RankEnd {
  int code = 0;    // exit code, or 128 + signal
  int signal = 0;  // 0: it exited
  bool has_failed() const { return code != 0; }
  bool is_one_of(const std::vector<int>& codes) const {
    return signal == 0 && std::ranges::count(codes, code) > 0;
  }
};

/// How the process ended, which it must have done; it remains to be reaped.
RankEnd end_of(pid_t pid);

}  // namespace tessera::launcher
