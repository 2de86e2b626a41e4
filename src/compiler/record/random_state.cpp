#include "compiler/record/random_state.h"

#include "compiler/record/key.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace tessera::compiler {

at::Tensor random_state() {
  const RunScope unseen;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state) {
  const RunScope unseen;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace tessera::compiler
