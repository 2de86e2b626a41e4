#include "compiler/kernels/host_library.h"

#include "base/environment.h"
#include "compiler/kernels/kernel_cache.h"

#include <dlfcn.h>
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
#include <map>
#include <mutex>
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

namespace {

/// Libraries of this process by the key of their cache entry.
struct Loaded {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<HostLibrary>> by_key;
};

Loaded& loaded() {
  static auto& libraries = *new Loaded();
  return libraries;
}

std::string key_of(const std::string& source, const Toolchain& toolchain) {
  std::string content = source + '\0' + toolchain.identity;
  for (const auto& option : Toolchain::options()) content += '\0' + option;
  return content_hash(content);
}

/// Puts source and library into the folder; each appears there whole or not at all.
bool build(const Toolchain& toolchain, const std::string& source, const PrivateFolder& folder,
           const std::string& key, std::string& why_not) {
  const std::string draft = key + "." + std::to_string(getpid());
  const std::string at = folder.path() + "/";
  bool done = folder.replace_file(draft + ".cpp", source);
  if (!done) why_not = at + draft + ".cpp can't be written: " + std::strerror(errno);
  if (done && toolchain.compile(at + draft + ".cpp", at + draft + ".so", &why_not)) {
    done = cache_entry::seal(at + draft + ".so") &&
           folder.rename_file(draft + ".cpp", key + ".cpp") &&
           folder.rename_file(draft + ".so", key + ".so");
    if (!done) why_not = at + key + ".so can't be written: " + std::strerror(errno);
  } else {
    done = false;
  }
  folder.remove_file(draft + ".cpp");
  folder.remove_file(draft + ".so");
  return done;
}

/// A loaded library with kernels of this interface in it. Null: why_not.
void* open_library(const std::string& library, std::string& why_not) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    why_not = library + " can't be loaded: " + (error == nullptr ? "no reason given" : error);
    return nullptr;
  }
  const auto* interface = static_cast<const int*>(dlsym(handle, kHostInterfaceSymbol));
  if (interface == nullptr) {
    why_not = library + " has no " + kHostInterfaceSymbol +
              " in it: the compiler did not compile what it was given; name another one by CXX";
  } else if (*interface != kHostInterface) {
    why_not = library + " has interface " + std::to_string(*interface) + ", expected " +
              std::to_string(kHostInterface) + "; remove the file";
  } else {
    return handle;
  }
  dlclose(handle);
  return nullptr;
}

void* open_if_sound(const std::string& library, std::string& why_not) {
  return cache_entry::is_sound(library) ? open_library(library, why_not) : nullptr;
}

/// Loads the library of `source` from `folder`; compiles it if it is not there or not what it
/// should be. Null: why_not.
void* load_from(const PrivateFolder& folder, const Toolchain& toolchain, const std::string& source,
                std::chrono::milliseconds patience, std::string& why_not) {
  const std::string key = key_of(source, toolchain);
  const std::string library = folder.path() + "/" + key + ".so";
  if (void* handle = open_if_sound(library, why_not)) return handle;
  const auto lock = FileLock::take(folder, key + ".lock", patience, &why_not);
  if (!lock) return nullptr;
  // Somebody else may have compiled it while this process waited for the lock.
  if (void* handle = open_if_sound(library, why_not)) return handle;
  remove_old_drafts(folder.path());
  return build(toolchain, source, folder, key, why_not) ? open_library(library, why_not) : nullptr;
}

/// From the cache folder, or from another one where that can't be used.
void* load_library(const Toolchain& toolchain, const std::string& source,
                   std::chrono::milliseconds patience, std::string& why_not) {
  const auto folder = open_cache(&why_not);
  if (!folder) return nullptr;
  void* handle = load_from(*folder, toolchain, source, patience, why_not);
  if (handle != nullptr || folder->is_temporary()) return handle;
  // Only after a failure: programs are loaded from a folder that can't be written to as well.
  const std::string why = why_unusable(*folder);
  if (why.empty()) return nullptr;
  const auto other = cache_instead_of(folder->path(), why, &why_not);
  return other ? load_from(*other, toolchain, source, patience, why_not) : nullptr;
}

}  // namespace

std::shared_ptr<HostLibrary> HostLibrary::load(const std::string& source, std::string* why_not,
                                               std::chrono::milliseconds patience) {
  const auto toolchain = Toolchain::find(why_not);
  if (!toolchain) return nullptr;
  const std::string key = key_of(source, *toolchain);
  // Held while compiling: ranks that are threads of one process wait here for each other.
  const std::lock_guard lock(loaded().mutex);
  auto& known = loaded().by_key[key];
  if (auto library = known.lock()) return library;
  std::string why;
  void* handle = load_library(*toolchain, source, patience, why);
  if (handle == nullptr) {
    if (why_not != nullptr) *why_not = why;
    return nullptr;
  }
  std::shared_ptr<HostLibrary> library(new HostLibrary(handle));
  known = library;
  return library;
}

HostLibrary::~HostLibrary() { dlclose(library_); }

void* HostLibrary::symbol(const std::string& name) const { return dlsym(library_, name.c_str()); }

}  // namespace tessera::compiler
