#include "comm/shm/device_medium.h"

#include "base/environment.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace tessera::comm::shm {
namespace {

// Large enough that 64 MiB are a few rounds: each costs a switch between the ranks' turns on a
// device that they share.
constexpr size_t kDeviceSlotBytes = size_t{16} << 20;

enum Stage : uint64_t { Nothing, Offered, Opened };

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the next call of anybody reports it again
  TORCH_CHECK_WITH(DistBackendError, false, what, ": ", cudaGetErrorString(code));
}

/// As CUDAGuard, in destructors: CUDA may have ended before.
class QuietDevice {
 public:
  explicit QuietDevice(c10::DeviceIndex device) {
    C10_CUDA_IGNORE_ERROR(cudaGetDevice(&before_));
    C10_CUDA_IGNORE_ERROR(cudaSetDevice(device));
  }
  ~QuietDevice() { C10_CUDA_IGNORE_ERROR(cudaSetDevice(before_)); }
  QuietDevice(const QuietDevice&) = delete;
  QuietDevice& operator=(const QuietDevice&) = delete;

 private:
  int before_ = 0;
};

/// What this rank shares: its slots, and the events behind the filling and the reading of each.
struct Shared {
  explicit Shared(c10::DeviceIndex device) : device(device) {
    const c10::cuda::CUDAGuard guard(device);
    try {
      check(cudaMalloc(&memory, kDeviceSlots * kDeviceSlotBytes), "memory for slots");
      for (auto* events : {&filled, &read}) {
        for (auto& event : *events)
          check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
                "an event between processes");
      }
    } catch (...) {
      release();
      throw;
    }
  }
  ~Shared() { release(); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  void release() {
    const QuietDevice guard(device);
    for (auto* events : {&filled, &read}) {
      for (auto& event : *events)
        if (event != nullptr) C10_CUDA_IGNORE_ERROR(cudaEventDestroy(event));
    }
    C10_CUDA_IGNORE_ERROR(cudaFree(memory));
  }

  c10::DeviceIndex device;
  void* memory = nullptr;
  std::array<cudaEvent_t, kDeviceSlots> filled{};
  std::array<cudaEvent_t, kDeviceSlots> read{};
};

/// A rank's slots as seen from here. In the same process they are used as they are.
struct Peer {
  const uint8_t* memory = nullptr;
  std::array<cudaEvent_t, kDeviceSlots> filled{};
  std::array<cudaEvent_t, kDeviceSlots> read{};
  bool is_own_process = false;
};

template <class Handle>
void put(std::array<char, kDeviceHandleBytes>& to, const Handle& handle) {
  static_assert(sizeof(handle) == kDeviceHandleBytes);
  std::memcpy(to.data(), &handle, sizeof(handle));
}

template <class Handle>
Handle get(const std::array<char, kDeviceHandleBytes>& from) {
  Handle handle;
  std::memcpy(&handle, from.data(), sizeof(handle));
  return handle;
}

void offer(const Shared& own, DeviceHandles& handles) {
  cudaIpcMemHandle_t memory;
  check(cudaIpcGetMemHandle(&memory, own.memory), "a handle of memory for other processes");
  put(handles.memory, memory);
  handles.memory_here = reinterpret_cast<uintptr_t>(own.memory);
  for (uint64_t slot = 0; slot < kDeviceSlots; ++slot) {
    cudaIpcEventHandle_t event;
    check(cudaIpcGetEventHandle(&event, own.filled[slot]), "a handle of an event");
    put(handles.filled[slot], event);
    check(cudaIpcGetEventHandle(&event, own.read[slot]), "a handle of an event");
    put(handles.read[slot], event);
    handles.filled_here[slot] = reinterpret_cast<uintptr_t>(own.filled[slot]);
    handles.read_here[slot] = reinterpret_cast<uintptr_t>(own.read[slot]);
  }
}

/// Of ranks that are threads of one process: kernels on `device` read the peer's memory.
void let_read(c10::DeviceIndex device, const void* memory) {
  cudaPointerAttributes place{};
  check(cudaPointerGetAttributes(&place, memory), "the device of a peer's memory");
  if (place.device == device) return;
  int can_read = 0;
  check(cudaDeviceCanAccessPeer(&can_read, device, place.device), "access between two GPUs");
  TORCH_CHECK_WITH(DistBackendError, can_read != 0, "GPU ", static_cast<int>(device),
                   " has no access to the memory of GPU ", place.device);
  const auto code = cudaDeviceEnablePeerAccess(place.device, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
  } else {
    check(code, "access between two GPUs");
  }
}

void open(Peer& peer, const RankBlock& block, c10::DeviceIndex device) {
  const auto& handles = block.device;
  if (block.pid == getpid()) {
    peer.is_own_process = true;
    peer.memory = reinterpret_cast<const uint8_t*>(handles.memory_here);
    let_read(device, peer.memory);
    for (uint64_t slot = 0; slot < kDeviceSlots; ++slot) {
      peer.filled[slot] = reinterpret_cast<cudaEvent_t>(handles.filled_here[slot]);
      peer.read[slot] = reinterpret_cast<cudaEvent_t>(handles.read_here[slot]);
    }
    return;
  }
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, get<cudaIpcMemHandle_t>(handles.memory),
                             cudaIpcMemLazyEnablePeerAccess),
        "opening a peer's memory");
  peer.memory = static_cast<const uint8_t*>(memory);
  for (uint64_t slot = 0; slot < kDeviceSlots; ++slot) {
    check(
        cudaIpcOpenEventHandle(&peer.filled[slot], get<cudaIpcEventHandle_t>(handles.filled[slot])),
        "opening a peer's event");
    check(cudaIpcOpenEventHandle(&peer.read[slot], get<cudaIpcEventHandle_t>(handles.read[slot])),
          "opening a peer's event");
  }
}

void close(const Peer& peer) {
  if (peer.is_own_process) return;
  for (const auto* events : {&peer.filled, &peer.read}) {
    for (const auto& event : *events)
      if (event != nullptr) C10_CUDA_IGNORE_ERROR(cudaEventDestroy(event));
  }
  if (peer.memory != nullptr)
    C10_CUDA_IGNORE_ERROR(cudaIpcCloseMemHandle(const_cast<uint8_t*>(peer.memory)));
}

class DeviceMedium final : public Medium {
 public:
  DeviceMedium(Channel& channel, c10::DeviceIndex device)
      : channel_(channel), device_(device), shared_(std::make_shared<Shared>(device)) {
    peers_.resize(channel.size());
  }
  ~DeviceMedium() override {
    const QuietDevice guard(device_);
    // Nothing of the group's is under way on this device after it; the peers' memory may go.
    C10_CUDA_IGNORE_ERROR(cudaStreamSynchronize(last_stream_));
    for (const auto& peer : peers_) close(peer);
    channel_.keep_until_unused(std::move(shared_));
  }

  void offer_own(DeviceHandles& handles) {
    const c10::cuda::CUDAGuard guard(device_);
    offer(*shared_, handles);
  }
  void open_peers() {
    const c10::cuda::CUDAGuard guard(device_);
    for (int rank = 0; rank < channel_.size(); ++rank)
      open(peers_[rank], *channel_.member(rank).block, device_);
  }

  size_t slot_bytes() const override { return kDeviceSlotBytes; }
  // All: processes that share a GPU take turns on it, and a turn should do as much as it can.
  uint64_t rounds_ahead() const override { return kDeviceSlots; }
  // A free slot has to be waited for, and so does a peer that opens memory.
  bool starts_at_issue() const override { return false; }
  // Memory of a device is fast and rounds are slow.
  size_t most_direct() const override { return std::numeric_limits<size_t>::max(); }

  uint8_t* slot(uint64_t round) override {
    const uint64_t index = round % kDeviceSlots;
    if (round >= kDeviceSlots) channel_.await_readers(round - kDeviceSlots + 1);
    for (int peer = 0; peer < channel_.size(); ++peer)
      if (peer != channel_.rank()) wait(peers_[peer].read[index]);
    return static_cast<uint8_t*>(shared_->memory) + index * kDeviceSlotBytes;
  }
  const uint8_t* peer_slot(int peer, uint64_t round) override {
    const uint64_t index = round % kDeviceSlots;
    channel_.await_posted(peer, round + 1);
    if (peer != channel_.rank()) wait(peers_[peer].filled[index]);
    return peers_[peer].memory + index * kDeviceSlotBytes;
  }
  void post_through(uint64_t end) override {
    record(shared_->filled, posted_, end);
    channel_.post_through(end);
  }
  void consume_through(uint64_t end) override {
    record(shared_->read, consumed_, end);
    channel_.consume_through(end);
  }
  void copy(uint8_t* to, const uint8_t* from, size_t bytes, CopyHint /*hint*/) override {
    if (bytes == 0 || to == from) return;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()), "a copy of slots");
  }
  void combine(const Combine& how, uint8_t* out, const std::vector<const void*>& operands,
               size_t bytes) override {
    combine_on_device({c10::kCUDA, device_}, how, out, operands, bytes);
  }
  std::optional<size_t> offset_of(const void*, size_t) const override { return std::nullopt; }

 private:
  cudaStream_t stream() { return last_stream_ = c10::cuda::getCurrentCUDAStream(device_).stream(); }
  void wait(cudaEvent_t event) {
    check(cudaStreamWaitEvent(stream(), event, 0), "waiting for a peer's work on the device");
  }
  /// Behind the rounds from `begin`, which becomes `end`, on; those before use the same events.
  void record(const std::array<cudaEvent_t, kDeviceSlots>& events, uint64_t& begin, uint64_t end) {
    const uint64_t from = std::max(begin, end < kDeviceSlots ? 0 : end - kDeviceSlots);
    for (uint64_t round = from; round < end; ++round)
      check(cudaEventRecord(events[round % kDeviceSlots], stream()), "an event between processes");
    begin = end;
  }

  Channel& channel_;
  const c10::DeviceIndex device_;
  std::shared_ptr<Shared> shared_;
  std::vector<Peer> peers_;
  cudaStream_t last_stream_ = nullptr;  // the group's
  uint64_t posted_ = 0;
  uint64_t consumed_ = 0;
};

/// Of any rank, once all have come to `stage`.
std::string find_problem(Channel& channel, const Pending& pending, Stage stage) {
  std::string problem;
  for (int rank = 0; rank < channel.size(); ++rank) {
    auto& block = *channel.member(rank).block;
    if (rank != channel.rank()) channel.await(pending, rank, block.device.stage, stage, block.bell);
    const auto& theirs = block.device.problem;
    if (problem.empty() && theirs[0] != '\0')
      problem = channel.label(rank) + ": " + std::string(theirs.data());
  }
  return problem;
}

template <class Step>
void take(Channel& channel, Stage stage, const Step& step) {
  auto& handles = channel.self().block->device;
  try {
    step();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const size_t length = std::min(text.size(), handles.problem.size() - 1);
    std::copy_n(text.data(), length, handles.problem.data());
    handles.problem[length] = '\0';
  }
  handles.stage.store(stage, std::memory_order_seq_cst);
  channel.self().block->bell.ring();
}

}  // namespace

bool device_medium_available() { return c10::cuda::device_count() > 0; }

DeviceMediumResult make_device_medium(Channel& channel, c10::Device device,
                                      const Pending& pending) {
  std::shared_ptr<DeviceMedium> medium;
  take(channel, Offered, [&] {
    TORCH_CHECK_WITH(DistBackendError, Environment().get("TESSERA_CUDA_IPC").value_or("1") != "0",
                     "TESSERA_CUDA_IPC is 0");
    medium = std::make_shared<DeviceMedium>(channel, device.index());
    medium->offer_own(channel.self().block->device);
  });
  auto problem = find_problem(channel, pending, Offered);
  take(channel, Opened, [&] {
    if (problem.empty()) medium->open_peers();
  });
  problem = find_problem(channel, pending, Opened);
  if (!problem.empty()) medium.reset();
  return {.medium = std::move(medium), .problem = std::move(problem)};
}

void check_not_captured(const char* collective, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  TORCH_CHECK(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
              "shm: ", collective,
              ": expected a stream that is not being captured into a CUDA graph; ranks meet on the "
              "host here, which a graph can't repeat: use the backend nccl inside of graphs");
}

}  // namespace tessera::comm::shm
