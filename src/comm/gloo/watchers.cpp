#include "comm/gloo/watchers.h"

namespace tessera::comm::gloo {

void Watchers::add(std::function<void()> wait, WorkPtr inner) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      watchers_.remove_if([](Watcher& watcher) {
        if (!watcher.done) return false;
        watcher.thread.join();
        return true;
      });
      auto& watcher = watchers_.emplace_back();
      watcher.inner = std::move(inner);
      watcher.thread = std::thread([&watcher, wait = std::move(wait)]() mutable {
        wait();
        wait = nullptr;  // the work goes before its thread counts as ended
        watcher.done = true;
      });
      return;
    }
  }
  wait();
}

void Watchers::close() {
  std::list<Watcher> rest;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    rest.swap(watchers_);
  }
  for (auto& watcher : rest) {
    if (!watcher.done) watcher.inner->abort();
  }
  for (auto& watcher : rest) watcher.thread.join();
}

}  // namespace tessera::comm::gloo
