#pragma once

#include "comm/shm/shm_backend.h"
#include "comm/shm/tensors.h"

#include <optional>

namespace tessera::comm::shm {

/// What one call of the backend puts together: collectives, the memory they use, and copies back to
/// tensors that were not contiguous.
class ShmBackend::Call {
 public:
  Call(ShmBackend& backend, const char* name, c10d::OpType type, std::chrono::milliseconds timeout,
       bool in_background);

  const char* name() const { return name_; }
  const Channel& channel() const { return backend_.channel(); }
  Descriptor describe(Kind kind, const at::Tensor& tensor, int reduce = -1,
                      int64_t root = -1) const;

  /// Where a collective of so many bytes, alike on all ranks, on tensors like this one takes place:
  /// what the functions below give is memory there.
  Place place(const at::Tensor& like, size_t bytes);
  /// Memory of a tensor that is only read, only written, or both; a copy if it is not contiguous or
  /// lies elsewhere.
  Bytes read(const at::Tensor& tensor);
  Bytes write(const at::Tensor& tensor);
  Bytes update(const at::Tensor& tensor);
  std::vector<Bytes> read_all(const std::vector<at::Tensor>& tensors);
  std::vector<Bytes> write_all(const std::vector<at::Tensor>& tensors);
  void add(CollectivePtr collective);
  /// A send or receive that the whole is not complete without; returns it.
  WorkPtr join(WorkPtr message);
  /// Queues it; waits for it unless in the background. While the backend coalesces, joins the
  /// others instead.
  WorkPtr submit();

 private:
  void follow_caller(const c10::Stream& stream);
  /// The stream for work on the tensor where it is, and keeps it for that; none: the host's.
  std::optional<c10::Stream> use(const at::Tensor& tensor) const;
  Bytes keep(const at::Tensor& memory);
  bool is_staged(const at::Tensor& tensor) const { return !tensor.is_cpu() && !on_device_; }
  void copy_back(const at::Tensor& to, const at::Tensor& from);
  void absorb(Call& other);

  ShmBackend& backend_;
  const char* name_;
  std::chrono::milliseconds timeout_;
  bool in_background_;
  bool on_device_ = false;
  ShmWork::Parts parts_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::vector<WorkPtr> messages_;
  friend class ShmBackend;
};

}  // namespace tessera::comm::shm
