#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::train {

/// Something that a GPU did: a kernel, a copy, a fill.
struct KernelRecord {
  std::string name;
  int64_t stream;
  int64_t begin, end;  // nanoseconds of the clock of spans
};

/// Records what the GPU does while it lives, by libtorch's profiler. One at a time, on one thread.
class KernelRecorder {
 public:
  KernelRecorder();
  ~KernelRecorder();
  KernelRecorder(const KernelRecorder&) = delete;
  KernelRecorder& operator=(const KernelRecorder&) = delete;

  /// Ends the recording. The device has done all that counts.
  std::vector<KernelRecord> take();

 private:
  bool is_on_ = true;
};

}  // namespace tessera::train
