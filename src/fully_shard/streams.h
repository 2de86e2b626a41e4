#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <vector>

// Note [streams of fully_shard]
// On a device a unit works on four streams. Computation has the current one. Shards are brought
// together on the gather stream: their copy from the host, casts and packing; the group's own
// communication stream goes on from there. Gradients leave for the host on the offload stream. Both
// begin after what the current stream has been given so far, so a gather ahead of its use runs
// beside the unit that computes. The current stream waits for it when the parameters are used, and
// unpacks. The host waits at the end of backward for gradients that go to its memory, before shards
// in its memory are written for the copies that read them, and after a reduction in which this rank
// had no gradient for a trainable parameter, to learn whether another had. Where ranks meet on the
// host, over shm and gloo, it waits for the others whenever the current stream is to wait.
//
// Memory is asked for on the current stream, kept until that waits for the others, and then freed
// in its order: the allocator gives it to nobody too early, and at once. What another stream than
// that reads is recorded for it.
namespace tessera::detail::fully_shard {

enum class Side { Gather, Offload };

/// While it lives, what is queued goes to that stream of the device, after what the current stream
/// has been given so far. Nothing on the CPU.
class OnSide {
 public:
  OnSide(Side side, c10::Device device);

  /// Recorded here and now; null on the CPU.
  std::optional<c10::Event> record() const;
  /// The tensor's memory is not given to others before this stream is done with it.
  void keep(const at::Tensor& tensor) const;

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// The current stream of the device waits.
void wait_for(const c10::Event& event, c10::Device device);
/// The tensors' memory is not given to others before the current stream is done with it.
void keep_for_current_stream(const std::vector<at::Tensor>& tensors);

/// Gradients on their way to the parameters.
struct Delivery {
  std::vector<at::Tensor> parts;      // undefined where there is none
  std::optional<c10::Event> arrives;  // on the host

  /// Where they are, or on the host.
  Delivery(std::vector<at::Tensor> gradients, bool to_host, c10::Device device);
};

}  // namespace tessera::detail::fully_shard
