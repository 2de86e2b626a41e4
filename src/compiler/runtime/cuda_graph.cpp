#include "compiler/runtime/cuda_graph.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace tessera::compiler {
namespace {

class LibtorchGraph final : public CudaGraph {
 public:
  explicit LibtorchGraph(c10::Device device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  void warm_up(c10::function_ref<void()> work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    wait(stream_, current);
    // Memory is kept by stream: what this one has let go is of no use to the other.
    c10::cuda::CUDACachingAllocator::emptyCache();
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      work();
    }
    wait(current, stream_);
  }

  void capture(c10::function_ref<void()> work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    wait(stream_, current);
    // What earlier runs left in the cache is of no use to the graph, whose memory is its own.
    c10::cuda::CUDACachingAllocator::emptyCache();
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      // Of this thread alone: other threads of ours and of NCCL ask the driver meanwhile.
      graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      try {
        work();
      } catch (...) {
        end_quietly(*graph);
        throw;
      }
      graph->capture_end();
    }
    wait(current, stream_);
    graph_ = std::move(graph);
  }

  void replay() override { graph_->replay(); }

 private:
  static void wait(const c10::cuda::CUDAStream& later, const c10::cuda::CUDAStream& earlier) {
    at::cuda::CUDAEvent event;
    event.record(earlier);
    event.block(later);
  }

  /// A capture must be ended for its stream to be of use again.
  static void end_quietly(at::cuda::CUDAGraph& graph) {
    try {
      graph.capture_end();
    } catch (const std::exception&) {
      // It is invalid by what the work did.
    }
    [[maybe_unused]] const auto cleared = cudaGetLastError();
  }

  c10::cuda::CUDAStream stream_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<CudaGraph> CudaGraph::make(c10::Device device) {
  return std::make_unique<LibtorchGraph>(device);
}

void* current_cuda_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace tessera::compiler
