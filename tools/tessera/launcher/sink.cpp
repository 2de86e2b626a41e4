#include "launcher/sink.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace tessera::launcher {
namespace {

constexpr std::size_t kFull = 1 << 20;
constexpr std::size_t kLargeChunk = 1 << 16;
constexpr int kChunksPerTurn = 16;

bool wants_colour(int fd) {
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  const char* term = std::getenv("TERM");
  if (term != nullptr && std::strcmp(term, "dumb") == 0) return false;
  return ::isatty(fd) == 1;
}

/// O_NONBLOCK belongs to the open file, which the launcher shares with its parent; only a file
/// opened anew may carry it. Sockets and other users' terminals refuse that.
Descriptor reopen_nonblocking(int fd) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return {};
  if (!S_ISFIFO(status.st_mode) && ::isatty(fd) != 1) return {};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return Descriptor(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
}

bool is_regular_file(int fd) {
  struct stat status;
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

}  // namespace

Sink::Sink(int fd)
    : fd_(fd),
      nonblocking_(reopen_nonblocking(fd)),
      // A blocking descriptor that polls writable takes at least PIPE_BUF bytes without waiting.
      chunk_(nonblocking_.is_open() || is_regular_file(fd) ? kLargeChunk : PIPE_BUF),
      is_coloured_(wants_colour(fd)) {}

bool Sink::is_full() const { return pending_.size() - sent_ >= kFull; }

void Sink::append(std::string_view text) {
  if (is_broken_ || text.empty()) return;
  if (!at_line_start_) pending_.push_back('\n');
  pending_.append(text);
  ++count_;
  at_line_start_ = text.back() == '\n';
}

void Sink::write_some() {
  for (int turn = 0; turn < kChunksPerTurn && has_pending(); ++turn) {
    pollfd ready{fd(), POLLOUT, 0};
    if (::poll(&ready, 1, 0) != 1) return;
    const std::size_t size = std::min(chunk_, pending_.size() - sent_);
    const ssize_t written = ::write(fd(), pending_.data() + sent_, size);
    if (written < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (written < 0 && errno == EPIPE) is_broken_ = true;
    if (written < 0) return discard();  // a full disk or a vanished terminal ends no job
    sent_ += static_cast<std::size_t>(written);
    if (!has_pending()) return discard();
    if (sent_ >= kFull) {
      pending_.erase(0, sent_);
      sent_ = 0;
    }
  }
}

void Sink::discard() {
  pending_.clear();
  sent_ = 0;
}

}  // namespace tessera::launcher
