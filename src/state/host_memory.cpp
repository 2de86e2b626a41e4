#include "state/host_memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace tessera::state {
namespace {

/// Of all threads: ranks may be threads of one process.
struct HostMemory {
  std::mutex mutex;
  std::vector<at::Tensor> free;
};

HostMemory& host_memory() {
  static auto& memory = *new HostMemory();  // threads may outlive static objects
  return memory;
}

}  // namespace

at::Tensor take_host_memory(size_t bytes, bool is_pinned) {
  const auto needed = static_cast<int64_t>(bytes);
  {
    auto& memory = host_memory();
    const std::lock_guard lock(memory.mutex);
    const auto fits = [&](const at::Tensor& one) {
      return one.numel() >= needed && one.is_pinned() == is_pinned;
    };
    const auto found = std::find_if(memory.free.begin(), memory.free.end(), fits);
    if (found != memory.free.end()) {
      auto taken = std::move(*found);
      memory.free.erase(found);
      return taken;
    }
    memory.free.clear();  // too small: the model has grown
  }
  return at::empty({needed}, at::TensorOptions(at::kByte).pinned_memory(is_pinned));
}

void give_back_host_memory(at::Tensor memory) {
  auto& kept = host_memory();
  const std::lock_guard lock(kept.mutex);
  kept.free.push_back(std::move(memory));
}

}  // namespace tessera::state
