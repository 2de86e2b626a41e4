#include "comm/completed_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace tessera::comm {
namespace {

class CompletedWork final : public c10d::Work {
 public:
  CompletedWork(c10d::OpType type, std::vector<at::Tensor> outputs, uint64_t sequence)
      : Work(/*rank=*/-1, type), outputs_(std::move(outputs)), sequence_(sequence) {
    finish();
  }

  bool wait(std::chrono::milliseconds) override { return true; }
  int sourceRank() const override { return 0; }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override { return 0; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    future->markCompleted(c10::IValue(static_cast<int64_t>(c10d::WorkResult::SUCCESS)));
    return future;
  }

 private:
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> completed_work(c10d::OpType type, std::vector<at::Tensor> outputs,
                                              uint64_t sequence) {
  return c10::make_intrusive<CompletedWork>(type, std::move(outputs), sequence);
}

}  // namespace tessera::comm
