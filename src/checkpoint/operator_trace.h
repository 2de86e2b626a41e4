#pragma once

#include <ATen/record_function.h>

#include <string>
#include <vector>

namespace tessera::recompute {

/// The operators of one run, in order, with the shapes of their arguments.
class OperatorTrace {
 public:
  /// Records this thread's operators into `trace`; into nothing if it is null.
  class Scope {
   public:
    explicit Scope(OperatorTrace* trace);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool active_;
    OperatorTrace* outer_;
    at::CallbackHandle handle_ = 0;
  };

  void clear();
  /// The operator that runs at the moment; "" outside of one.
  std::string current() const;
  /// One line each, indented by depth.
  std::string text() const;

  void started(const at::RecordFunction& function);
  void ended();

 private:
  struct Call {
    std::string text;
    size_t depth;
  };
  std::vector<Call> calls_;
  std::vector<std::string> running_;
};

}  // namespace tessera::recompute
