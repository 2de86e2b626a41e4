#include "compiler/kernels/host_library.h"

#include "compiler/kernels/cache_entry.h"
#include "compiler/kernels/cache_folder.h"
#include "compiler/kernels/toolchain.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

namespace tessera::compiler {
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
