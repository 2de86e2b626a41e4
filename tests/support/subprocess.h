#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

/// How a process ended: by exit code, or by signal (then `signal` is not 0).
struct ExitStatus {
  int code = 0;
  int signal = 0;

  bool ok() const { return code == 0 && signal == 0; }
  /// "exit code 3" or "signal 9 (Killed)".
  std::string text() const;
};

struct SubprocessOptions {
  std::vector<std::string> arguments;  // [0]: the program, a path or a name on PATH
  /// Added to this process's environment; no value: removed from it.
  std::map<std::string, std::optional<std::string>> environment = {};
  std::filesystem::path output = {};  // file for standard output and error; empty: inherited
  std::filesystem::path folder = {};  // to run in; empty: this process's
  bool own_process_group = false;  // so that a signal to -pid reaches its children and nobody else
};

/// A program that outlives neither this object (killed and reaped) nor the thread that made it
/// (killed by the kernel).
class Subprocess {
 public:
  explicit Subprocess(SubprocessOptions options);
  ~Subprocess();
  Subprocess(Subprocess&& other) noexcept;
  Subprocess& operator=(Subprocess&&) = delete;

  pid_t pid() const { return pid_; }
  /// No effect once the process was reaped.
  void signal(int number) const;
  /// SIGSTOP, and returns once the process is really stopped. False: it has ended.
  bool stop();
  void resume();
  bool stopped() const { return stopped_; }

  /// None: it still runs after `timeout`. Stays answerable after the end.
  std::optional<ExitStatus> wait(std::chrono::milliseconds timeout);
  /// What it has written to its output file so far.
  std::string output() const;

 private:
  friend bool wait_any(const std::vector<Subprocess*>&, std::chrono::steady_clock::time_point);
  bool observe(int flags);

  pid_t pid_ = -1;
  int pid_descriptor_ = -1;
  bool own_process_group_ = false;
  bool stopped_ = false;
  std::filesystem::path output_;
  std::optional<ExitStatus> status_;
};

/// Blocks until one of these has ended or `deadline` is reached; true if one has. All ended: true
/// at once.
bool wait_any(const std::vector<Subprocess*>& processes,
              std::chrono::steady_clock::time_point deadline);

struct ProgramResult {
  ExitStatus status;
  bool timed_out = false;  // killed at the deadline
  std::string output;      // standard output and error as they came
};

/// Runs a program to its end, or kills it (with its process group) after `timeout`.
ProgramResult run_program(SubprocessOptions options,
                          std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace tessera::testing
