#include "compiler/runtime/cuda_graph.h"

#include <c10/util/Exception.h>

namespace tessera::compiler {

std::unique_ptr<CudaGraph> CudaGraph::make(c10::Device /*device*/) { return nullptr; }

void* current_cuda_stream(c10::Device /*device*/) {
  TORCH_INTERNAL_ASSERT(false, "a CUDA stream in a build without CUDA");
}

}  // namespace tessera::compiler
