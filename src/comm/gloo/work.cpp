#include <tessera/trace.h>

#include "comm/gloo/call_queue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

namespace tessera::comm::gloo {

GlooWork::GlooWork(c10d::OpType type, CallRecordPtr issue, LogPtr log, Tensors outputs,
                   DeviceCallPtr device_call)
    : Work(/*rank=*/-1, type),
      issue_(std::move(issue)),
      log_(std::move(log)),
      outputs_(std::move(outputs)),
      device_call_(std::move(device_call)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_of(device_call_))),
      future_result_(c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get())) {}

bool GlooWork::wait(std::chrono::milliseconds timeout) {
  const Span span(SpanKind::Communication, log_->span_name());
  prepare_wait(timeout);
  try {
    return Work::wait(timeout);
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const c10::Error&) {
    if (Work::isCompleted()) throw;
    log_->throw_impatient(*issue_);
  }
}

float GlooWork::getDuration() const {
  TORCH_CHECK(duration_us_ >= 0,
              "gloo: getDuration: expected a completed collective, got one under way; ",
              "wait() for it first");
  return static_cast<float>(duration_us_) / 1e3F;
}

void GlooWork::complete(const std::exception_ptr& gloo_error,
                        const std::function<void()>& afterwards) {
  std::exception_ptr error = gloo_error ? log_->fail(*issue_, gloo_error) : nullptr;
  std::optional<c10::StreamGuard> on_stream;  // the future records its events on it
  if (!error) {
    try {
      if (device_call_) on_stream.emplace(device_call_->stream());
      const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
      if (afterwards) afterwards();
      if (device_call_) {
        device_call_->end();
        // Here, not where somebody waits: who polls takes a complete work for one that can be read.
        device_call_->await_end();
      }
      issue_->state = CallRecord::State::Done;
    } catch (...) {
      error = std::current_exception();
      issue_->state = CallRecord::State::Failed;
    }
  }
  duration_us_ =
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - issue_->since).count();
  const auto result = error ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
  finish(error);  // before the callbacks of the futures, which may ask
  error ? future_->setError(error) : future_->markCompleted(c10::IValue(outputs_));
  future_result_->markCompleted(c10::IValue(static_cast<int64_t>(result)));
}

void CollectiveWork::prepare_wait(std::chrono::milliseconds timeout) {
  // A wait that may end early leaves the queue to its thread.
  if (queue_ && timeout <= kNoTimeout) queue_->run_until_started(*this);
}

void CollectiveWork::begin(const c10::intrusive_ptr<CollectiveWork>& self,
                           std::function<void()> afterwards) {
  self->afterwards_ = std::move(afterwards);
  self->log_->enter(self->issue_, [self] {
    self->complete_once(std::make_exception_ptr(std::runtime_error(kLeft)));
  });
}

void CollectiveWork::follow(const c10::intrusive_ptr<CollectiveWork>& self,
                            const std::vector<WorkPtr>& parts) {
  if (parts.empty()) return self->end(nullptr);
  self->open_parts_ = parts.size();
  for (const auto& part : parts) {
    part->getFuture()->addCallback([self](c10::ivalue::Future& future) {
      self->end_part(future.hasError() ? future.exception_ptr() : nullptr);
    });
  }
}

void CollectiveWork::end(const std::exception_ptr& error) {
  complete_once(error);
  log_->leave(issue_);
}

void CollectiveWork::end_part(const std::exception_ptr& error) {
  if (error) {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = error;
  }
  if (open_parts_.fetch_sub(1) == 1) end(error_);
}

void CollectiveWork::complete_once(const std::exception_ptr& error) {
  if (is_ending_.exchange(true)) return;
  complete(error, afterwards_);
  afterwards_ = nullptr;
}

PointWork::PointWork(c10d::OpType type, CallRecordPtr issue, LogPtr log, Tensors outputs,
                     DeviceCallPtr device_call, WorkPtr inner, std::function<void()> afterwards,
                     Watchers watchers)
    : GlooWork(type, std::move(issue), std::move(log), std::move(outputs), std::move(device_call)),
      inner_(std::move(inner)),
      afterwards_(std::move(afterwards)),
      watchers_(std::move(watchers)) {}

void PointWork::run(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  try {
    TORCH_CHECK(inner_->wait(timeout), kLeft);
  } catch (...) {
    error = std::current_exception();
  }
  complete(error, afterwards_);
}

void PointWork::watch() {
  if (!claim()) return;
  auto self = c10::intrusive_ptr<PointWork>::reclaim_copy(this);
  watchers_([self] { self->run(kNoTimeout); });
}

bool PointWork::wait(std::chrono::milliseconds timeout) {
  if (claim()) run(timeout);
  return GlooWork::wait(timeout);
}

bool PointWork::isCompleted() {
  watch();
  return Work::isCompleted();
}

FuturePtr PointWork::getFuture() {
  watch();
  return GlooWork::getFuture();
}

FuturePtr PointWork::getFutureResult() {
  watch();
  return GlooWork::getFutureResult();
}

}  // namespace tessera::comm::gloo
