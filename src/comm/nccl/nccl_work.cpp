#include "comm/nccl/nccl_work.h"

#include <tessera/trace.h>

#include "base/error_text.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

namespace tessera::comm::nccl {

NcclWork::NcclWork(c10d::OpType type, WorkPtr inner, IssuePtr issue, std::shared_ptr<GroupLog> log,
                   std::shared_ptr<Watch> watch, std::optional<Tensors> outputs)
    : Work(/*rank=*/-1, type),
      inner_(std::move(inner)),
      issue_(std::move(issue)),
      log_(std::move(log)),
      watch_(std::move(watch)),
      outputs_(std::move(outputs)) {}

void NcclWork::throw_if_failed() const {
  if (const auto failure = log_->failure()) std::rethrow_exception(failure);
}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  const Span span(SpanKind::Communication, log_->span_name());
  throw_if_failed();
  try {
    inner_->wait(timeout);
  } catch (...) {
    std::rethrow_exception(watch_->fail(*issue_, text_of(std::current_exception())));
  }
  throw_if_failed();
  return true;
}

bool NcclWork::isSuccess() const { return !exception() && inner_->isCompleted(); }

std::exception_ptr NcclWork::exception() const {
  const auto failure = log_->failure();
  return failure ? failure : inner_->exception();
}

std::vector<at::Tensor> NcclWork::result() { return outputs_ ? *outputs_ : inner_->result(); }

FuturePtr NcclWork::getFuture() {
  if (!outputs_) return inner_->getFuture();
  return inner_->getFuture()->then(
      [outputs = *outputs_](c10::ivalue::Future&) { return c10::IValue(outputs); },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace tessera::comm::nccl
