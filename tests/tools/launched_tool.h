#pragma once

#include "launcher/descriptor.h"

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::test {

using launcher::Descriptor;

/// A process the test watches without being its parent.
class WatchedProcess {
 public:
  explicit WatchedProcess(pid_t pid);
  pid_t pid() const { return pid_; }
  bool has_ended() const;
  /// Waits for the end; false if it does not come within the time limit of the tests.
  bool ends() const;

 private:
  pid_t pid_;
  Descriptor pidfd_;
};

/// A named pipe, by which test and ranks wait for each other.
class Fifo {
 public:
  explicit Fifo(const std::string& name);
  ~Fifo();
  Fifo(const Fifo&) = delete;
  Fifo& operator=(const Fifo&) = delete;

  const std::string& path() const { return path_; }
  void write_line() const;
  std::string read_line() const;

 private:
  std::string path_;
  Descriptor fd_;  // opened for both directions, so that no open() waits for another
};

/// The children of a process, by /proc.
std::vector<pid_t> children_of(pid_t parent);

struct ToolOptions {
  std::vector<std::string> arguments;
  std::vector<std::string> environment = {};  // "NAME=VALUE" sets, "NAME" removes
  std::string input = {};                     // all of stdin, when it is a pipe
  bool has_terminal = false;  // stdin, stdout and stderr are a terminal; read as out
  bool has_one_pipe = false;  // stderr goes where stdout goes; read as out
};

struct ToolResult {
  int exit_code;  // 128 + signal if the tool itself was killed
  std::string out;
  std::string err;
};

/// `tessera` as a child of the test. Every wait is for an event and fails by exception, with what
/// the tool has said so far, after the time limit.
class LaunchedTool {
 public:
  explicit LaunchedTool(const ToolOptions& options);
  ~LaunchedTool();  // kills it if it still runs
  LaunchedTool(const LaunchedTool&) = delete;
  LaunchedTool& operator=(const LaunchedTool&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  void type(const std::string& keys) const;  // at the terminal

  /// Reads until stdout (or stderr) has a whole line that begins with `start`; returns its rest.
  std::string rest_of_out_line(const std::string& start);
  std::string rest_of_err_line(const std::string& start);  // leaves stdout unread

  /// Waits until the tool has been stopped as by ctrl-Z.
  void wait_until_stopped() const;

  /// Reads both streams to their ends and waits for the exit.
  ToolResult wait();

 private:
  [[noreturn]] void become_tool(const ToolOptions& options, int in, int out, int err) const;
  void read_until(const std::function<bool()>& is_enough, bool also_out);
  [[noreturn]] void give_up(const std::string& what) const;

  pid_t pid_ = -1;
  Descriptor out_;  // the terminal's master side when there is a terminal
  Descriptor err_;
  std::string out_text_;
  std::string err_text_;
};

/// Runs the tool to its end.
ToolResult run_tool(const ToolOptions& options);

/// `tessera run <options> -- /bin/sh -c <script>`.
std::vector<std::string> shell_ranks(std::vector<std::string> options, const std::string& script);

/// `tessera run <options> -- rank_probe <words>`.
std::vector<std::string> probe_ranks(std::vector<std::string> options,
                                     const std::vector<std::string>& words);

std::vector<std::string> lines_of(const std::string& text);

/// The lines of `text` in alphabetical order, for output of several ranks.
std::vector<std::string> sorted_lines(const std::string& text);

}  // namespace tessera::test
