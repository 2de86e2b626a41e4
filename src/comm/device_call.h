#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace tessera::comm {

/// What one collective does on a device: on a stream of the group's own, which waits for what the
/// caller's stream has under way at the call, and for which the caller's stream waits when it waits
/// for the collective. The host waits for the device in await_host() alone. Needs no CUDA header.
class DeviceCall {
 public:
  /// `stream` waits from here on for the current stream of its device.
  explicit DeviceCall(c10::Stream stream);

  const c10::Stream& stream() const { return stream_; }

  /// A contiguous copy in pinned memory, there once await_host() has returned.
  at::Tensor to_host(const at::Tensor& tensor);
  static at::Tensor empty_host(const at::Tensor& like);
  /// Until the copies so far are there.
  void await_host();

  /// The tensor's memory is not given to others before the stream is done with it.
  void keep(const at::Tensor& tensor);

  /// What follows on the stream belongs to others.
  void end();
  /// The current stream of the device waits for the end.
  void join() const;
  bool has_ended() const { return ended_.query(); }

 private:
  c10::Stream stream_;
  c10::Event ready_;
  c10::Event ended_;
};

/// A contiguous copy in pinned memory, there once the current stream has made it.
at::Tensor copy_to_host(const at::Tensor& tensor);
/// Into a tensor of a device, by its current stream.
void copy_from_host(const at::Tensor& to, const at::Tensor& from);

/// Of the device, for futures: none without one.
std::vector<c10::Device> devices_of(const std::shared_ptr<DeviceCall>& call);

/// A stream of the device for communication, ahead of computation where the device knows such
/// priorities.
c10::Stream communication_stream(c10::Device device);

}  // namespace tessera::comm
