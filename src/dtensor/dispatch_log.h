#pragma once

#include <ATen/core/operator_name.h>

#include <map>
#include <string>

namespace tessera::dtensor {

/// Which operators this thread ran on distributed tensors while it lives, and how. For tests that
/// count coverage.
class DispatchLog {
 public:
  struct Entry {
    int calls = 0;
    int without_rule = 0;  // all inputs were gathered
    int kept_sharded = 0;  // some input or output stayed sharded or partial
  };

  DispatchLog();
  ~DispatchLog();
  DispatchLog(const DispatchLog&) = delete;
  DispatchLog& operator=(const DispatchLog&) = delete;

  const std::map<std::string, Entry>& entries() const { return entries_; }
  void clear() { entries_.clear(); }

  /// The innermost one of this thread; null: nobody counts.
  static DispatchLog* current();
  void add(const c10::OperatorName& name, bool has_rule, bool is_sharded);

 private:
  std::map<std::string, Entry> entries_;
  DispatchLog* previous_;
};

}  // namespace tessera::dtensor
