#pragma once

#include "comm/shm/mailroom.h"

#include <ATen/core/ivalue.h>

namespace tessera::comm::shm {

/// One send or receive under way.
class MailWork final : public c10d::Work {
 public:
  MailWork(int rank, Mailroom::Message message, std::shared_ptr<Mailroom> mailroom);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override { return {message_.original}; }
  int sourceRank() const override { return source; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // --- for the mailroom
  const Mailroom::Message& message() const { return message_; }
  const Pending& pending() const { return pending_; }
  bool is_done() const { return done_.load(std::memory_order_acquire); }
  void end(const std::exception_ptr& exception);
  void tell_future();

  int source = -1;             // who sent it
  MailEntry* entry = nullptr;  // of a send that is read in place

 private:
  Mailroom::Message message_;
  Pending pending_;
  std::shared_ptr<Mailroom> mailroom_;
  Channel::Record record_;
  std::atomic<bool> done_{false};
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_told_ = false;
};

}  // namespace tessera::comm::shm
