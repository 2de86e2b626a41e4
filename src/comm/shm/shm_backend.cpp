// Making, ending and the parts of a group that are no collectives of tensors.
#include "comm/shm/shm_backend.h"

#include "comm/shm/issue.h"
#include "comm/shm/join.h"
#include "comm/shm/shared_tensor.h"
#include "comm/shm/tensors.h"

#include <c10/util/Exception.h>

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
  return device == c10::DeviceType::CPU && !c10::isQIntType(dtype);
}

ShmBackend::ShmBackend(const BackendRequest& request)
    : Backend(request.rank, request.size),
      executor_(std::make_shared<Executor>(request)),
      mailroom_(
          std::make_shared<Mailroom>(std::shared_ptr<Channel>(executor_, &executor_->channel()))),
      timeout_(request.timeout) {}

ShmBackend::~ShmBackend() {
  if (channel().is_own_process()) {
    shutdown();
    return;
  }
  // In a process forked from the rank: destroying them would wait for threads that are not here.
  static_cast<void>(new std::shared_ptr<Executor>(std::move(executor_)));
  static_cast<void>(new std::shared_ptr<Mailroom>(std::move(mailroom_)));
}

void ShmBackend::shutdown() {
  if (!channel().is_own_process()) return;
  if (!channel().has_limit()) channel().set_limit(Clock::now() + kCloseTimeout);
  executor_->close();
  mailroom_->close();
  channel().leave();
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
  coalescing_ = std::make_unique<Issue>(*this, "tessera:coalesced", OpType::COALESCED,
                                        c10d::kUnsetTimeout, true);
}

WorkPtr ShmBackend::endCoalescing() {
  TORCH_CHECK(coalescing_, "shm: endCoalescing: call startCoalescing first");
  const auto issue = std::move(coalescing_);
  return issue->submit();
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  Issue issue(*this, "tessera:barrier", OpType::BARRIER, opts.timeout, opts.asyncOp);
  issue.add(make_barrier(issue.describe(Kind::Barrier, {})));
  return issue.submit();
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  Issue issue(*this, "tessera:monitored_barrier", OpType::BARRIER, opts.timeout, false);
  issue.add(make_barrier(issue.describe(Kind::MonitoredBarrier, {})));
  issue.submit()->wait();
}

WorkPtr ShmBackend::post(Mailroom::Message message) {
  auto work = mailroom_->submit(std::move(message));
  return coalescing_ ? coalescing_->join(std::move(work)) : work;
}

WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  channel().check_usable("send");
  const Check check = arguments("send");
  const auto& tensor = check.only(tensors);
  check.check_peer(destination);
  const auto contiguous = make_plain(tensor);
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
  const auto contiguous = is_plain(tensor) ? tensor : empty_plain(tensor);
  return post({.is_send = false,
               .peer = source,
               .tag = tag,
               .dtype = static_cast<int>(tensor.scalar_type()),
               .data = bytes_of(contiguous),
               .timeout = timeout_,
               .original = tensor,
               .contiguous = contiguous});
}

WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  return receive("recv", tensors, source, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive("recv", tensors, kAnyPeer, tag);
}

}  // namespace tessera::comm::shm
