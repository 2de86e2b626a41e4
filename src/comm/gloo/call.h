#pragma once

#include "comm/gloo/gloo_backend.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm::gloo {

/// One call of the backend: the collectives of gloo's that it started, the memory they use, and
/// what follows them. The add functions check nothing; check first, for what is started can't be
/// taken back.
class GlooBackend::Call {
 public:
  Call(GlooBackend& backend, const char* name, c10d::OpType type, std::chrono::milliseconds timeout,
       bool in_background = true);

  const ArgumentChecks& check() const { return check_; }
  /// Throws TypeError if the dtype does not have the operation.
  void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  /// What it does, for peers and messages, before anything is added; `contributions` are this
  /// rank's.
  void describe(Kind kind, const Tensors& contributions, int reduce = -1, int64_t root = -1);
  /// A list that is alike on all ranks: of tensors, or of what each rank contributes.
  void describe_parts(const Tensors& parts);
  /// all_to_all: bytes by peer.
  void describe_exchange(const std::vector<uint64_t>& sent, const std::vector<uint64_t>& received);
  /// The most bytes that one rank sends another, if not all that it contributes.
  void set_largest_part(size_t bytes) { descriptor_.largest_part = bytes; }

  void add_broadcast(const at::Tensor& tensor, int64_t root);
  void add_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op);
  /// As one all-reduce of all of them, which have one dtype.
  void add_all_reduce(const Tensors& tensors, const c10d::ReduceOp& op);
  void add_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root);
  /// `input`: memory that read() gave.
  void add_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op);
  void add_all_gather(const at::Tensor& output, const at::Tensor& input);
  void add_all_gather(const Tensors& outputs, const at::Tensor& input);
  /// inputs by destination, outputs by source; an undefined tensor is nothing.
  void add_exchange(const Tensors& outputs, const Tensors& inputs);
  /// The same for rows of two tensors.
  void add_exchange(const at::Tensor& output, const std::vector<int64_t>& output_rows,
                    const at::Tensor& input, const std::vector<int64_t>& input_rows);
  void add_barrier(const c10d::BarrierOptions& opts);
  WorkPtr submit();

  /// Host memory that gloo may use for a tensor which it reads, writes, or both: its own, or a copy
  /// if it is not contiguous or on a GPU. All tensors of a call are on one device.
  at::Tensor read(const at::Tensor& tensor);
  at::Tensor write(const at::Tensor& tensor);
  at::Tensor update(const at::Tensor& tensor);
  std::function<void()> take_afterwards();
  std::string title(uint64_t sequence);
  const DeviceCallPtr& device_call() const { return device_call_; }
  Tensors outputs;

 private:
  std::vector<int64_t> equal_parts(int64_t bytes) const {
    return std::vector<int64_t>(backend_.getSize(), bytes);
  }
  void note_device(const at::Tensor& tensor);
  /// Of a tensor on a GPU.
  at::Tensor fetch(const at::Tensor& tensor);
  void add_all_reduce_of(const at::Tensor& memory, const c10d::ReduceOp& op);
  void add_allgather_bytes(const at::Tensor& output, const at::Tensor& input);
  void add_alltoall_bytes(const at::Tensor& output, std::vector<int64_t> output_counts,
                          const at::Tensor& input, std::vector<int64_t> input_counts);
  /// Whether headers carry the data: what gloo would reduce is gathered instead.
  bool is_carried() const;
  void move(Tensors sent, Tensors received);
  /// `tensor`'s memory, which must be contiguous, as elements of `dtype`, which are not larger;
  /// 1-D. Counts as held by gloo while it lives.
  at::Tensor memory_as(const at::Tensor& tensor, c10::ScalarType dtype) const;
  at::Tensor bytes_of(const at::Tensor& tensor) const { return memory_as(tensor, at::kByte); }
  template <class Start>
  void start(Start start) {
    starts_.emplace_back(std::move(start));
  }
  void afterwards(std::function<void()> function) { afterwards_.push_back(std::move(function)); }

  GlooBackend& backend_;
  const ArgumentChecks check_;
  const c10d::OpType type_;
  const std::chrono::milliseconds timeout_;
  const bool in_background_;
  std::optional<c10::Device> device_;
  DeviceCallPtr device_call_;  // null: CPU tensors
  const std::shared_ptr<void> held_ = std::make_shared<char>();
  Descriptor descriptor_;
  std::vector<Movement> movements_;
  std::vector<std::function<WorkPtr(Engine&)>> starts_;
  std::vector<std::function<void()>> afterwards_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from; after everything else
};

/// What gloo can reduce in place of `dtype` and `op`; none: only whole reductions of what was
/// gathered.
struct Carrier {
  c10::ScalarType dtype;
  c10d::ReduceOp::RedOpType op;
};
std::optional<Carrier> find_carrier(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);

}  // namespace tessera::comm::gloo
