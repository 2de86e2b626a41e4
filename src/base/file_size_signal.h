#pragma once

#include <csignal>

namespace tessera {

/// While it lives, a write of this thread past the limit on file sizes (ulimit -f) fails with
/// EFBIG; otherwise the kernel's SIGXFSZ would end the process. Leaves errno alone.
class FileSizeSignalBlock {
 public:
  FileSizeSignalBlock();
  ~FileSizeSignalBlock();
  FileSizeSignalBlock(const FileSizeSignalBlock&) = delete;
  FileSizeSignalBlock& operator=(const FileSizeSignalBlock&) = delete;

 private:
  sigset_t before_;
  bool was_pending_ = false;
};

}  // namespace tessera
