#include "comm/file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

namespace tessera::comm {
namespace {

// Note [file stores]
// c10d removes the file when the last store object in any process is destroyed. Between two worlds
// that may be the very moment in which a quick rank joins again: it has read how often it has left,
// and loses the file. So every rank keeps its latest store until its process ends.
struct Kept {
  c10::intrusive_ptr<c10d::Store> store;
  int file = -1;  // open, so that a file made later is not mistaken for this one
};

using Key = std::tuple<pid_t, std::string, int>;  // by process: a forked child ends nothing here

std::mutex kept_mutex;
auto& kept_stores = *new std::map<Key, Kept>();

bool is_at(const std::string& path, int file) {
  struct stat here{};
  struct stat there{};
  return fstat(file, &here) == 0 && stat(path.c_str(), &there) == 0 &&
         here.st_ino == there.st_ino && here.st_dev == there.st_dev;
}

void let_go(const std::string& path, Kept& kept) {
  // Somebody has removed the file. If there is another one by now, this object must not count
  // itself out of that.
  if (!is_at(path, kept.file)) static_cast<void>(kept.store.release());
  kept.store.reset();
  close(kept.file);
}

void let_go_of_all() {
  const std::lock_guard lock(kept_mutex);
  for (auto& [key, kept] : kept_stores) {
    const auto& [process, path, rank] = key;
    if (process == getpid()) let_go(path, kept);
  }
  std::erase_if(kept_stores, [](const auto& entry) { return !entry.second.store; });
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int rank, int world_size) {
  // Registered before init() registers shutdown(), so it runs after that.
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(let_go_of_all); });
  auto store = c10::make_intrusive<c10d::FileStore>(path, world_size);
  const std::lock_guard lock(kept_mutex);
  auto& kept = kept_stores[{getpid(), path, rank}];
  if (kept.store) let_go(path, kept);
  kept = {.store = store, .file = open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  return store;
}

}  // namespace tessera::comm
