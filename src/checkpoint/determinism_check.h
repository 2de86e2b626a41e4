#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <string>
#include <typeinfo>
#include <vector>

namespace tessera::detail::checkpoint {

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

/// What the determinism check knows about a saved tensor.
struct SavedDescription {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  const std::type_info* made_by;  // autograd node that made the tensor; null for a leaf
  std::string saved_by;           // operator; "" unless operators are traced

  static SavedDescription of(const at::Tensor& tensor, std::string saved_by);
  /// Of shape, dtype and device; where the tensor came from is for messages.
  bool matches(const SavedDescription& other) const;
  std::string text() const;
};

/// What to say about the differences; "" if there are none. Compares as many as were recomputed.
std::string describe_differences(const std::vector<SavedDescription>& saved,
                                 const std::vector<SavedDescription>& recomputed);

}  // namespace tessera::detail::checkpoint
