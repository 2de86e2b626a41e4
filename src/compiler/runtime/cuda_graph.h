#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <memory>

/// What needs headers of CUDA: cuda_graph.cpp, or no_cuda_graph.cpp in builds without.
namespace tessera::compiler {

/// What some work queues on a GPU, to be queued again at once. Its memory stays with it.
class CudaGraph {
 public:
  /// Null in builds without CUDA.
  static std::unique_ptr<CudaGraph> make(c10::Device device);
  virtual ~CudaGraph() = default;

  /// Runs `work` on the stream that capture() uses, so that libraries have set up what they need
  /// there. The current stream waits for it.
  virtual void warm_up(c10::function_ref<void()> work) = 0;
  /// Records what `work` queues, without doing it. Throws what the work throws, or that it can't be
  /// captured; then there is nothing to replay.
  virtual void capture(c10::function_ref<void()> work) = 0;
  /// Queues it on the current stream. Random operators draw on.
  virtual void replay() = 0;
  /// Gives its memory back, but for what is still held of it. Then it can be captured again.
  virtual void release() = 0;
};

/// The native handle of the device's current stream.
void* current_cuda_stream(c10::Device device);

}  // namespace tessera::compiler
