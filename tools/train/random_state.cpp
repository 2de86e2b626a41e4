#include "train/random_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>

namespace tessera::train {

std::string random_state(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  const auto state = generator.get_state();
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

void set_random_state(c10::Device device, const std::string& bytes) {
  auto state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(state.mutable_data_ptr()));
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

KeptRandomState::KeptRandomState(c10::Device device)
    : device_(device), of_host_(random_state(at::kCPU)), of_device_(random_state(device)) {}

KeptRandomState::~KeptRandomState() {
  set_random_state(at::kCPU, of_host_);
  if (!device_.is_cpu()) set_random_state(device_, of_device_);
}

}  // namespace tessera::train
