#pragma once

#include "comm/gloo/work.h"

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

namespace tessera::comm::gloo {

/// Threads that wait for sends and receives whose callers only poll.
class Watchers {
 public:
  ~Watchers() { close(); }
  /// Runs `wait` on a thread; close() ends it by aborting `inner`.
  void add(std::function<void()> wait, WorkPtr inner);
  void close();

 private:
  struct Watcher {
    std::thread thread;
    WorkPtr inner;
    std::atomic<bool> done{false};
  };

  std::mutex mutex_;
  std::list<Watcher> watchers_;
  bool closed_ = false;
};

}  // namespace tessera::comm::gloo
