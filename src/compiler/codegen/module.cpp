#include "compiler/codegen/module.h"

#include "compiler/codegen/cache_entry.h"
#include "compiler/codegen/cache_folder.h"
#include "compiler/codegen/toolchain.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>

namespace tessera::compiler {
namespace {

/// Modules of this process by the key of their cache entry.
struct Loaded {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Module>> by_key;
};

Loaded& loaded() {
  static auto& modules = *new Loaded();
  return modules;
}

std::string key_of(const std::string& source, const Toolchain& toolchain) {
  std::string content = source + '\0' + toolchain.identity;
  for (const auto& option : Toolchain::options()) content += '\0' + option;
  return content_hash(content);
}

bool write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << content;
  file.close();
  return file.good();
}

/// Puts source and library into the folder; each appears there whole or not at all.
bool build(const Toolchain& toolchain, const std::string& source, const std::string& entry,
           std::string* why_not) {
  const std::string draft = entry + "." + std::to_string(getpid());
  const std::string draft_source = draft + ".cpp";
  const std::string draft_library = draft + ".so";
  bool done = write_file(draft_source, source);
  if (!done && why_not != nullptr) *why_not = draft_source + " can't be written";
  if (done && toolchain.compile(draft_source, draft_library, why_not)) {
    done = cache_entry::seal(draft_library) &&
           std::rename(draft_source.c_str(), (entry + ".cpp").c_str()) == 0 &&
           std::rename(draft_library.c_str(), (entry + ".so").c_str()) == 0;
    if (!done && why_not != nullptr) *why_not = entry + ".so can't be written";
  } else {
    done = false;
  }
  unlink(draft_source.c_str());
  unlink(draft_library.c_str());
  return done;
}

/// The library of `source` in `folder`, compiled if it is not there or not sound. Empty: why_not.
std::string find_or_build(const Toolchain& toolchain, const std::string& source,
                          const std::string& folder, std::chrono::milliseconds patience,
                          std::string* why_not) {
  const std::string entry = folder + "/" + key_of(source, toolchain);
  const std::string library = entry + ".so";
  if (cache_entry::is_sound(library)) return library;
  const auto lock = FileLock::take(entry + ".lock", patience, why_not);
  if (!lock) return "";
  // Somebody else may have compiled it while this process waited for the lock.
  if (cache_entry::is_sound(library)) return library;
  return build(toolchain, source, entry, why_not) ? library : "";
}

}  // namespace

std::shared_ptr<Module> Module::load(const std::string& source, std::string* why_not,
                                     std::chrono::milliseconds patience) {
  const auto toolchain = Toolchain::find(why_not);
  if (!toolchain) return nullptr;
  const std::string key = key_of(source, *toolchain);
  // Held while compiling: ranks that are threads of one process wait here for each other.
  const std::lock_guard lock(loaded().mutex);
  auto& known = loaded().by_key[key];
  if (auto module = known.lock()) return module;
  const CacheFolder folder = CacheFolder::open();
  const auto library = find_or_build(*toolchain, source, folder.path(), patience, why_not);
  if (library.empty()) return nullptr;
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    if (why_not != nullptr) *why_not = error == nullptr ? "dlopen failed" : error;
    return nullptr;
  }
  std::shared_ptr<Module> module(new Module(handle));
  known = module;
  return module;
}

Module::~Module() { dlclose(library_); }

void* Module::symbol(const std::string& name) const { return dlsym(library_, name.c_str()); }

}  // namespace tessera::compiler
