#include "base/signal_block.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <thread>

namespace tessera {
namespace {

/// The write end of a pipe that nobody reads.
int unread_pipe() {
  std::array<int, 2> ends{};
  EXPECT_EQ(pipe(ends.data()), 0);
  close(ends[0]);
  return ends[1];
}

int errno_of_write(int descriptor) {
  errno = 0;
  return write(descriptor, "x", 1) < 0 ? errno : 0;
}

TEST(SignalBlock, LeavesOfABrokenPipeItsErrnoAlone) {
  const int end = unread_pipe();
  {
    const SignalBlock block(SIGPIPE);
    EXPECT_EQ(errno_of_write(end), EPIPE);
    std::thread([&] { EXPECT_EQ(errno_of_write(end), EPIPE); }).join();
  }
  // The signal did not stay behind, and outside it is as before.
  EXPECT_EXIT(errno_of_write(end), ::testing::KilledBySignal(SIGPIPE), "");
  close(end);
}

TEST(SignalBlock, LeavesASignalThatWasPendingBefore) {
  const int end = unread_pipe();
  const SignalBlock outer(SIGPIPE);
  EXPECT_EQ(errno_of_write(end), EPIPE);
  {
    const SignalBlock inner(SIGPIPE);
  }
  sigset_t pending;
  ASSERT_EQ(sigpending(&pending), 0);
  EXPECT_EQ(sigismember(&pending, SIGPIPE), 1);
  close(end);
}

}  // namespace
}  // namespace tessera
