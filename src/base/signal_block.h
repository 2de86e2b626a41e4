#pragma once

#include <csignal>

namespace tessera {

/// While it lives, a write of this thread that the kernel answers with `signal` fails with its
/// errno alone: SIGXFSZ with EFBIG (past ulimit -f), SIGPIPE with EPIPE (nobody reads any more).
/// Either signal would end the process. Threads begun meanwhile block it for good. Leaves errno
/// alone.
class SignalBlock {
 public:
  explicit SignalBlock(int signal);
  ~SignalBlock();
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t set_;
  sigset_t before_;
  int signal_;
  bool was_pending_ = false;
};

}  // namespace tessera
