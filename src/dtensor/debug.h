#pragma once

#include <ATen/core/operator_name.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace tessera::dtensor {

/// Tells the comm_debug scopes in force.
void count_collective(const char* kind, size_t bytes);

struct DispatchEntry {
  int calls = 0;
  int without_rule = 0;  // all inputs were gathered
  int kept_sharded = 0;  // some input or output stayed sharded or partial
};

/// What a DispatchLog has counted. Threads in which backward runs keep it too.
class DispatchCounts {
 public:
  const std::map<std::string, DispatchEntry>& entries() const { return entries_; }
  void add(const c10::OperatorName& name, bool has_rule, bool is_sharded);
  void clear();

 private:
  std::mutex mutex_;
  std::map<std::string, DispatchEntry> entries_;
};

/// Which operators this thread, and the backward that it calls, ran on distributed tensors while it
/// lives, and how. Of nested ones the innermost counts. For tests that count coverage.
class DispatchLog {
 public:
  DispatchLog();
  ~DispatchLog();
  DispatchLog(const DispatchLog&) = delete;
  DispatchLog& operator=(const DispatchLog&) = delete;

  /// To be read while no backward runs.
  const std::map<std::string, DispatchEntry>& entries() const { return counts_->entries(); }
  void clear() { counts_->clear(); }

 private:
  std::shared_ptr<DispatchCounts> counts_;
  c10::DebugInfoGuard scope_;
};

}  // namespace tessera::dtensor
