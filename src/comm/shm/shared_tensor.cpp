#include "comm/shm/shared_tensor.h"

#include "comm/shm/arena.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

namespace tessera::comm::shm {

at::Tensor make_shared_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(), "empty_shared: expected a CPU tensor, got device ",
                    options.device());
  TORCH_CHECK_VALUE(options.layout() == c10::kStrided,
                    "empty_shared: expected a dense tensor, got layout ", options.layout());
  size_t bytes = options.dtype().itemsize();
  for (const auto size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "empty_shared: expected sizes of 0 or more, got ", sizes);
    TORCH_CHECK_VALUE(!__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes),
                      "empty_shared: a tensor of sizes ", sizes, " is larger than memory can be");
  }
  auto arena = Arena::own();
  const auto offset = arena->allocate(bytes, "empty_shared");
  auto tensor = at::for_blob(arena->base() + offset, sizes)
                    .deleter([arena, offset](void*) { arena->release(offset); })
                    .options(options.requires_grad(false))
                    .make_tensor();
  return options.requires_grad() ? tensor.set_requires_grad(true) : tensor;
}

}  // namespace tessera::comm::shm
