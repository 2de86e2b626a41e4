#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <typeinfo>
#include <vector>

namespace tessera::recompute {

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

}  // namespace tessera::recompute
