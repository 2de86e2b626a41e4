#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace tessera::comm::gloo {

// Note [staging]
// gloo gets copies of CUDA tensors in pinned host memory, and from there on a call is the same as
// one of CPU tensors: same checks, same bits. What a call reads is copied when it is issued, on the
// caller's stream, and the host waits for it: the bytes go out at once. What it writes is copied
// back by the thread that completes it, on a stream of the pool behind all that the caller had
// queued at the issue, and is there when the work is complete.

/// The way of one call's tensors between a CUDA device and the host. See Note [staging].
class Staging {
 public:
  /// Remembers what the caller has queued on its current stream.
  explicit Staging(c10::Device device);

  c10::Device device() const { return device_; }
  /// A copy of `tensor` in pinned memory, complete; or only the memory for one.
  static at::Tensor fetch(const at::Tensor& tensor);
  static at::Tensor make_room(at::IntArrayRef sizes, c10::ScalarType dtype);
  /// A stream for the copies back.
  c10::Stream begin_return() const;
  /// Copies on the current stream, one of begin_return(); both may be freed at once.
  static void give_back(const at::Tensor& to, const at::Tensor& from);

 private:
  const c10::Device device_;
  c10::Event issued_;
};

}  // namespace tessera::comm::gloo
