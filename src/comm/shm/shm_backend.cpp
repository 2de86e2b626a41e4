// Making, ending and the parts of a group that are no collectives of tensors.
#include "comm/shm/shm_backend.h"

#include "comm/shm/call.h"
#include "comm/shm/device_medium.h"
#include "comm/shm/member.h"
#include "comm/shm/shared_memory.h"
#include "comm/shm/tensors.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tessera::comm::shm {

using c10d::OpType;

namespace {

// How long a group that is shut down waits for what nobody waited for.
constexpr std::chrono::milliseconds kCloseTimeout{10'000};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  return c10::make_intrusive<ShmBackend>(request);
}

bool available() { return true; }

bool supports(c10::DeviceType device, c10::ScalarType dtype) {
  if (c10::isQIntType(dtype)) return false;
  return device == c10::DeviceType::CPU ||
         (device == c10::DeviceType::CUDA && device_medium_available());
}

ShmBackend::ShmBackend(const BackendRequest& request)
    : Backend(request.rank, request.size),
      executor_(std::make_shared<Executor>(request)),
      queue_(
          std::make_shared<P2PQueue>(std::shared_ptr<Channel>(executor_, &executor_->channel()))),
      timeout_(request.timeout),
      host_medium_(executor_->channel()) {}

ShmBackend::~ShmBackend() {
  if (channel().is_own_process()) {
    shutdown();
    return;
  }
  // In a process forked from the rank: destroying them would wait for threads that are not here.
  static_cast<void>(new std::shared_ptr<Executor>(std::move(executor_)));
  static_cast<void>(new std::shared_ptr<P2PQueue>(std::move(queue_)));
  static_cast<void>(new std::shared_ptr<Medium>(std::move(device_medium_)));
}

void ShmBackend::shutdown() {
  if (!channel().is_own_process()) return;
  if (!channel().has_limit()) channel().set_limit(Clock::now() + kCloseTimeout);
  executor_->close();
  queue_->close();
  device_medium_.reset();
  channel().leave();
}

namespace {

/// Ranks come together to share memory of their devices.
class DeviceMeeting final : public Collective {
 public:
  DeviceMeeting(Medium& medium, const Descriptor& descriptor, c10::Device device,
                DeviceMediumResult& result)
      : Collective(medium, descriptor), device_(device), result_(result) {}
  bool starts_at_once(const Channel&) const override { return false; }

 protected:
  void begin(Channel&) override {}
  void complete(Channel& channel) override {
    for (int peer = 0; peer < channel.size(); ++peer)
      if (peer != channel.rank()) channel.meet(peer);
    const auto now = Clock::now();
    result_ = make_device_medium(channel, device_,
                                 {.descriptor = descriptor_,
                                  .since = now,
                                  .deadline = now + std::min(timeout, kLongestTimeout)});
  }

 private:
  c10::Device device_;
  DeviceMediumResult& result_;
};

}  // namespace

const c10::Stream& ShmBackend::device_stream(c10::Device device) {
  if (!device_stream_) device_stream_ = communication_stream(device);
  TORCH_CHECK_VALUE(device_stream_->device() == device, "shm: group '", channel().group_name(),
                    "' on ", channel().label(rank_), ": expected tensors on ",
                    device_stream_->device(), ", where its first one was, got one on ", device);
  return *device_stream_;
}

Medium* ShmBackend::device_medium(const char* collective, c10::Device device) {
  device_stream(device);
  if (std::exchange(has_met_on_device_, true)) return device_medium_.get();
  DeviceMediumResult result;
  {
    const Bookkeeping function(collective);
    const CallNote note("sharing memory of the GPUs, once per group");
    auto coalesced = std::move(coalescing_);
    Call call(*this, "tessera:device_meeting", c10d::OpType::BARRIER, timeout_, false);
    call.add(std::make_unique<DeviceMeeting>(host_medium_, call.describe(Kind::Barrier, {}), device,
                                             result));
    call.submit()->wait();
    coalescing_ = std::move(coalesced);
  }
  if (!result.medium && rank_ == 0)
    TORCH_WARN("shm: group '", channel().group_name(),
               "': CUDA tensors go through pinned host memory, which is slower: ", result.problem);
  device_medium_ = std::move(result.medium);
  return device_medium_.get();
}

void ShmBackend::begin_close(Clock::time_point deadline) {
  if (!channel().is_own_process()) return;
  channel().set_limit(deadline);
  executor_->nudge();
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

c10d::ErrorType ShmBackend::getError() {
  return channel().has_failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  return make_shared_tensor({size}, options);
}

std::chrono::milliseconds ShmBackend::timeout_of(std::chrono::milliseconds given) const {
  return given == c10d::kUnsetTimeout || given <= kNoTimeout ? timeout_ : given;
}

ShmBackend::Check::~Check() {
  if (std::uncaught_exceptions() > exceptions_) backend_.coalescing_.reset();
}

void ShmBackend::startCoalescing() {
  TORCH_CHECK(!coalescing_, "shm: startCoalescing: already coalescing; call endCoalescing first");
  coalescing_ = std::make_unique<Call>(*this, "tessera:coalesced", OpType::COALESCED,
                                       c10d::kUnsetTimeout, true);
}

WorkPtr ShmBackend::endCoalescing() {
  TORCH_CHECK(coalescing_, "shm: endCoalescing: call startCoalescing first");
  const auto call = std::move(coalescing_);
  return call->submit();
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  Call call(*this, "tessera:barrier", OpType::BARRIER, opts.timeout, opts.asyncOp);
  call.add(make_barrier({channel(), host_medium_}, call.describe(Kind::Barrier, {})));
  return call.submit();
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  Call call(*this, "tessera:monitored_barrier", OpType::BARRIER, opts.timeout, false);
  call.add(make_barrier({channel(), host_medium_}, call.describe(Kind::MonitoredBarrier, {})));
  call.submit()->wait();
}

WorkPtr ShmBackend::post(P2PQueue::Message message) {
  auto work = queue_->submit(std::move(message));
  return coalescing_ ? coalescing_->join(std::move(work)) : work;
}

at::Tensor ShmBackend::copy_to_host(const at::Tensor& tensor) {
  DeviceCall call(device_stream(tensor.device()));
  auto copy = call.to_host(tensor);
  call.await_host();
  return copy;
}

WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  channel().check_usable("send");
  const Check check = arguments("send");
  const auto& tensor = check.only(tensors);
  if (!tensor.is_cpu()) check_not_captured("send", tensor.device());
  check.check_peer(destination);
  const auto contiguous = tensor.is_cpu() ? make_plain(tensor) : copy_to_host(tensor);
  return post({.is_send = true,
               .peer = destination,
               .tag = tag,
               .dtype = static_cast<int>(tensor.scalar_type()),
               .data = bytes_of(contiguous),
               .timeout = timeout_,
               .original = tensor,
               .contiguous = contiguous});
}

WorkPtr ShmBackend::receive(const char* caller, Tensors& tensors, int source, int tag) {
  channel().check_usable(caller);
  const Check check = arguments(caller);
  const auto& tensor = check.only(tensors);
  check.check_written(tensor);
  if (source != kAnyPeer) check.check_peer(source);
  std::shared_ptr<DeviceCall> device;
  if (!tensor.is_cpu()) {
    check_not_captured(caller, tensor.device());
    device = std::make_shared<DeviceCall>(device_stream(tensor.device()));
  }
  const auto contiguous = device             ? DeviceCall::empty_host(tensor)
                          : is_plain(tensor) ? tensor
                                             : empty_plain(tensor);
  return post({.is_send = false,
               .peer = source,
               .tag = tag,
               .dtype = static_cast<int>(tensor.scalar_type()),
               .data = bytes_of(contiguous),
               .timeout = timeout_,
               .original = tensor,
               .contiguous = contiguous,
               .device = device});
}

WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  return receive("recv", tensors, source, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive("recv", tensors, kAnyPeer, tag);
}

}  // namespace tessera::comm::shm
