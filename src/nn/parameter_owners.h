#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace tessera::nn {

/// Which module's engine has a parameter: one at most. Ranks may be threads.
class ParameterOwners {
 public:
  void add(const at::Tensor& parameter, const std::string& owner) {
    const std::lock_guard lock(mutex_);
    owners_[parameter.unsafeGetTensorImpl()] = owner;
  }
  std::optional<std::string> find(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    const auto found = owners_.find(parameter.unsafeGetTensorImpl());
    return found == owners_.end() ? std::nullopt : std::optional(found->second);
  }
  void remove(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    owners_.erase(parameter.unsafeGetTensorImpl());
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, std::string> owners_;
};

}  // namespace tessera::nn
