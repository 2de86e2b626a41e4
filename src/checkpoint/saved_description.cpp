#include "checkpoint/saved_description.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <sstream>

namespace tessera::recompute {

SavedDescription SavedDescription::of(const at::Tensor& tensor, std::string saved_by) {
  const auto& node = tensor.grad_fn();
  return {tensor.is_nested() ? std::vector<int64_t>() : tensor.sizes().vec(), tensor.scalar_type(),
          tensor.device(), node ? &typeid(*node) : nullptr, std::move(saved_by)};
}

bool SavedDescription::matches(const SavedDescription& other) const {
  return sizes == other.sizes && dtype == other.dtype && device == other.device;
}

std::string SavedDescription::text() const {
  std::ostringstream text;
  text << at::IntArrayRef(sizes) << ' ' << dtype << " on " << device;
  if (!saved_by.empty()) text << ", saved by " << saved_by;
  if (made_by) {
    const auto name = c10::demangle(made_by->name());
    text << ", made by " << name.substr(name.rfind(':') + 1);
  }
  return text.str();
}

std::string describe_differences(const std::vector<SavedDescription>& saved,
                                 const std::vector<SavedDescription>& recomputed) {
  constexpr int kMost = 5;
  std::string text;
  int different = 0;
  for (size_t i = 0; i < std::min(saved.size(), recomputed.size()); ++i) {
    if (saved[i].matches(recomputed[i]) || ++different > kMost) continue;
    text += "\n  tensor " + std::to_string(i) + " of " + std::to_string(saved.size()) +
            ": the forward saved " + saved[i].text() + "; the recomputation " +
            recomputed[i].text();
  }
  if (different > kMost) text += "\n  and " + std::to_string(different - kMost) + " more";
  return text;
}

}  // namespace tessera::recompute
