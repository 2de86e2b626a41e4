#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <vector>

namespace tessera::comm {

// Note [compute engine]
// Processes that share a GPU take turns on its compute engine, and a turn costs more than 100 us;
// its copy engines serve all at once. Events and waits of a stream that computes are work for the
// compute engine. So none are issued where the host can see that there is nothing to wait for, and
// the host rather looks for a moment whether a small copy ends.
//
// A small message is little more than calls of the driver. So memory is copied without an operator
// where it is plain, events are used again, and what the host has seen to be over is neither asked
// for again nor marked for an allocator: pinned memory goes back with no event.

/// What one collective does on a device: on a stream of its own, which waits for what the caller's
/// stream has under way at the call, and for which the caller's stream waits when it waits for the
/// collective. Tensors go through pinned host memory, or stay on the device and are kept. The host
/// waits for the device in await_host() and await_end(), and looks for a moment in join(). Needs no
/// CUDA header.
class DeviceCall {
 public:
  /// Follows the caller.
  explicit DeviceCall(c10::Stream stream);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  const c10::Stream& stream() const { return stream_; }
  /// From here on the stream waits for what the current stream of its device has under way.
  void follow_caller();

  /// A contiguous copy in pinned memory, there once await_host() has returned.
  at::Tensor to_host(const at::Tensor& tensor);
  static at::Tensor empty_host(const at::Tensor& like);
  /// Whether the copies so far are there, or will be in a moment: then after it.
  bool is_on_host() const;
  void await_host();
  /// Copies to a tensor of the device, from there or from the host.
  void copy_back(const at::Tensor& to, const at::Tensor& from);

  /// The tensor's memory is not given to others before the stream is done with it.
  void keep(const at::Tensor& tensor) const;

  /// What follows on the stream belongs to others.
  void end();
  bool has_ended() const { return is_ended_ && sees_mark(); }
  void await_end() const { await_mark(); }
  /// The current stream of the device waits for the end.
  void join() const;

 private:
  void mark();
  void await_mark() const;
  bool sees_mark() const;
  bool sees_mark_soon() const;

  c10::Stream stream_;
  c10::Event ready_;        // on the caller's stream
  c10::Event mark_;         // behind the copies to the host, then behind the end
  bool is_behind_ = false;  // the stream may have to wait for the caller's
  bool is_ended_ = false;
  mutable std::atomic<bool> is_seen_{false};  // the mark, by the host, and nothing was issued since
  std::vector<at::Tensor> held_;              // by copies that may be under way
};

/// Of the device, for futures: none without one.
std::vector<c10::Device> devices_of(const std::shared_ptr<DeviceCall>& call);

/// A stream of the device for communication, ahead of computation where the device knows such
/// priorities.
c10::Stream communication_stream(c10::Device device);
/// One that only copies: another one at each call, so that a result does not wait for what a later
/// call follows, and never one of NCCL's, whose kernels wait for peers.
c10::Stream copy_stream(c10::Device device);

}  // namespace tessera::comm
