#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::train {

/// Something that a GPU did: a kernel, a copy, a fill.
struct KernelRecord {
  std::string name;
  int device;
  int64_t stream;
  int64_t begin, end;  // nanoseconds of the clock of spans
};

/// What to say where a GPU has worked and nothing was recorded.
inline constexpr const char* kNoKernels =
    "libtorch's profiler recorded no kernels: CUPTI, which it asks, may not be allowed here, or "
    "another profiler has the GPU; KINETO_LOG_LEVEL=0 tells more";

/// Records what the GPU does while it lives, whatever thread asks for it, by libtorch's profiler.
/// One at a time; made and ended on one thread.
class KernelRecorder {
 public:
  KernelRecorder();
  ~KernelRecorder();
  KernelRecorder(const KernelRecorder&) = delete;
  KernelRecorder& operator=(const KernelRecorder&) = delete;

  /// Ends the recording, by start. The device has done all that counts. Empty: kNoKernels.
  std::vector<KernelRecord> take();

 private:
  bool is_on_ = true;
};

}  // namespace tessera::train
