#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace tessera::test {

/// What report_in_browser.py returns where there is no browser.
constexpr int kScriptSkips = 77;

struct ShellOutput {
  int exit_code;
  std::string text;  // of stdout
};

/// Runs a command of /bin/sh to its end.
inline ShellOutput run_shell(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("run_shell: popen failed");
  std::string text;
  char part[4096];
  for (std::size_t count = 0; (count = fread(part, 1, sizeof part, pipe)) > 0;)
    text.append(part, count);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text};
}

/// A word of /bin/sh that means `text`.
inline std::string quoted(const std::string& text) {
  std::string word = "'";
  for (const char letter : text) word += letter == '\'' ? "'\\''" : std::string(1, letter);
  return word + "'";
}

}  // namespace tessera::test
