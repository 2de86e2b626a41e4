#pragma once

#include "comm/arguments.h"
#include "comm/nccl/watch.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <optional>

namespace tessera::comm::nccl {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// c10d's work with errors that tell what happened where. wait() makes the current stream wait, as
/// c10d's does, and throws if the group has failed by then.
class NcclWork final : public c10d::Work {
 public:
  /// `outputs`: what the caller passed, if NCCL works on other views of it.
  NcclWork(c10d::OpType type, WorkPtr inner, IssuePtr issue, std::shared_ptr<GroupLog> log,
           std::shared_ptr<Watch> watch, std::optional<Tensors> outputs);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  std::vector<at::Tensor> result() override;
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return issue_->sequence; }
  int sourceRank() const override { return inner_->sourceRank(); }

 private:
  void throw_if_failed() const;

  const WorkPtr inner_;
  const IssuePtr issue_;
  const std::shared_ptr<GroupLog> log_;
  const std::shared_ptr<Watch> watch_;
  const std::optional<Tensors> outputs_;
};

}  // namespace tessera::comm::nccl
