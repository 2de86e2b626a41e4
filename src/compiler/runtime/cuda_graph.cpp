#include "compiler/runtime/cuda_graph.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace tessera::compiler {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

/// While one lives: the most bytes that are in use at once, of those allocated on a stream. Of two
/// at once the later one counts.
class PeakUse {
 public:
  explicit PeakUse(cudaStream_t stream) : stream_(stream) {
    static const bool is_told = attach();
    if (!is_told) return;
    const std::lock_guard lock(mutex_);
    current_ = this;
  }
  ~PeakUse() {
    const std::lock_guard lock(mutex_);
    if (current_ == this) current_ = nullptr;
  }
  PeakUse(const PeakUse&) = delete;
  PeakUse& operator=(const PeakUse&) = delete;

  int64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  static bool attach() {
    try {
      caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
        const std::lock_guard lock(mutex_);
        if (current_ != nullptr) current_->note(entry);
      });
      return true;
    } catch (const c10::Error&) {
      return false;  // cudaMallocAsync tells nobody
    }
  }

  void note(const caching::TraceEntry& entry) {
    constexpr int64_t kRounding = 512;            // of the allocator
    constexpr int64_t kSmall = int64_t{1} << 20;  // what it keeps apart
    if (entry.action_ == caching::TraceEntry::ALLOC && entry.stream_ == stream_) {
      const auto bytes =
          (static_cast<int64_t>(entry.size_) + kRounding - 1) / kRounding * kRounding;
      if (bytes <= kSmall) return;
      held_[entry.addr_] = bytes;
      now_ += bytes;
      most_ = std::max(most_, now_);
    } else if (entry.action_ == caching::TraceEntry::FREE_COMPLETED) {
      const auto found = held_.find(entry.addr_);
      if (found == held_.end()) return;
      now_ -= found->second;
      held_.erase(found);
    }
  }

  inline static std::mutex mutex_;
  inline static PeakUse* current_ = nullptr;
  cudaStream_t stream_;
  std::unordered_map<decltype(caching::TraceEntry::addr_), int64_t> held_;
  int64_t now_ = 0, most_ = 0;
};

class LibtorchGraph final : public CudaGraph {
 public:
  explicit LibtorchGraph(c10::Device device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  void warm_up(c10::function_ref<void()> work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    wait(stream_, current);
    // Memory is kept by stream: what this one has let go is of no use to the other.
    caching::emptyCache();
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      const PeakUse use(stream_.stream());
      work();
      arena_bytes_ = use.bytes();
    }
    wait(current, stream_);
  }

  void capture(c10::function_ref<void()> work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    wait(stream_, current);
    // What earlier runs left in the cache is of no use to the graph, whose memory is its own.
    caching::emptyCache();
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      // Of this thread alone: other threads of ours and of NCCL ask the driver meanwhile.
      graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      try {
        reserve_arena();
        work();
      } catch (...) {
        end_quietly(*graph);
        throw;
      }
      graph->capture_end();
    }
    wait(current, stream_);
    graph_ = std::move(graph);
    replays_ = 0;
  }

  void replay() override {
    // By now gradients of the runs before the capture are free.
    if (++replays_ == 2) caching::emptyCache();
    graph_->replay();
  }

  void release() override {
    // Replays may be under way on other streams than the memory's.
    const c10::cuda::CUDAGuard guard(stream_.device_index());
    c10::cuda::device_synchronize();
    graph_.reset();
    caching::emptyCache();
  }

 private:
  /// One block that the work's tensors lie in: what the allocator asks for tensor by tensor are
  /// pieces that fit few others. Its size is known from the warm-up; what it lacks is asked for as
  /// usual.
  void reserve_arena() const {
    constexpr int64_t kBetween = 64;  // one part of so many: gaps between tensors
    const auto bytes = static_cast<size_t>(arena_bytes_ + arena_bytes_ / kBetween);
    // The allocator would not take small tensors from a block beyond this.
    if (bytes >= c10::CachingAllocator::AcceleratorAllocatorConfig::max_split_size()) return;
    if (bytes == 0) return;
    try {
      [[maybe_unused]] const auto arena = caching::get()->allocate(bytes);
    } catch (const c10::OutOfMemoryError&) {
      // Then in pieces.
    }
  }

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
  int64_t arena_bytes_ = 0;
  int64_t replays_ = 0;  // since it was captured
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
