#include "compiler/kernels/toolchain.h"

#include "base/environment.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

extern char** environ;

namespace tessera::compiler {
namespace {

std::string path_of(const std::string& program) {
  if (program.find('/') != std::string::npos)
    return access(program.c_str(), X_OK) == 0 ? program : "";
  std::istringstream folders(Environment().get("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = (folder.empty() ? "." : folder) + "/" + program;
    struct stat found{};
    if (stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode) &&
        access(path.c_str(), X_OK) == 0)
      return path;
  }
  return "";
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// What -march=native depends on.
std::string processor() {
  std::ifstream lines("/proc/cpuinfo");
  std::string text;
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    if (line.starts_with("model name") || line.starts_with("flags") ||
        line.starts_with("Features") || line.starts_with("CPU part"))
      text += line + "\n";
  }
  return text;
}

std::string identity_of(const std::vector<std::string>& command) {
  std::error_code error;
  const auto real = std::filesystem::canonical(command[0], error);
  struct stat file{};
  stat(command[0].c_str(), &file);
  std::ostringstream text;
  text << real.string() << " " << file.st_size << " " << file.st_mtim.tv_sec << "."
       << file.st_mtim.tv_nsec << "\n";
  for (const auto& word : command) text << word << " ";
  text << "\n" << processor();
  return text.str();
}

std::string beginning_of(const std::string& path) {
  std::ifstream file(path);
  std::string text(2000, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

/// Runs a program by its argument vector, without a shell; its output goes to a file. The status of
/// waitpid, or -1 and errno.
int run(const std::vector<std::string>& command, const std::string& output) {
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t child = -1;
  const int error = posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    errno = error;
    return -1;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return status;
}

}  // namespace

std::optional<Toolchain> Toolchain::find(std::string* why_not) {
  const auto chosen = Environment().get("CXX");
  const std::vector<std::string> candidates =
      chosen ? std::vector<std::string>{*chosen}
             : std::vector<std::string>{"c++", "g++", "clang++"};
  for (const auto& candidate : candidates) {
    Toolchain toolchain{.command = words_of(candidate), .identity = ""};
    if (toolchain.command.empty()) continue;
    toolchain.command[0] = path_of(toolchain.command[0]);
    if (toolchain.command[0].empty()) continue;
    toolchain.identity = identity_of(toolchain.command);
    return toolchain;
  }
  if (why_not != nullptr) {
    *why_not = chosen
                   ? "no C++ compiler: CXX='" + *chosen + "' is not an executable program"
                   : "no C++ compiler: none of c++, g++ and clang++ is on PATH, and CXX is unset";
    *why_not += "; name a compiler by CXX";
  }
  return std::nullopt;
}

const std::vector<std::string>& Toolchain::options() {
  static const auto& options = *new std::vector<std::string>{"-O3",
                                                             "-march=native",
                                                             "-std=c++17",
                                                             "-shared",
                                                             "-fPIC",
                                                             "-ffp-contract=off",
                                                             "-fno-math-errno",
                                                             "-fno-trapping-math",
                                                             "-fwrapv",
                                                             "-w"};
  return options;
}

bool Toolchain::compile(const std::string& source, const std::string& library,
                        std::string* why_not) const {
  auto line = command;
  line.insert(line.end(), options().begin(), options().end());
  line.insert(line.end(), {"-x", "c++", source, "-o", library, "-lm"});
  const std::string output = library + ".log";
  const int status = run(line, output);
  const int error = errno;
  const std::string said = beginning_of(output);
  unlink(output.c_str());
  const bool is_there = access(library.c_str(), R_OK) == 0;
  if (status == 0 && is_there) return true;
  if (why_not == nullptr) return false;
  std::ostringstream text;
  text << command[0];
  if (status == 0) {
    text << " made no library, and no error: is it a C++ compiler? " << said;
  } else if (status == -1) {
    text << " did not start: " << std::strerror(error);
  } else if (WIFSIGNALED(status)) {
    text << " was ended by signal " << WTERMSIG(status) << ": " << said;
  } else {
    text << " failed with exit code " << WEXITSTATUS(status) << ": " << said;
  }
  *why_not = text.str();
  while (!why_not->empty() && std::isspace(static_cast<unsigned char>(why_not->back())) != 0)
    why_not->pop_back();
  *why_not += "; name another compiler by CXX";
  return false;
}

}  // namespace tessera::compiler
