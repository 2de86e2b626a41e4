#include "launcher/output.h"

#include "launcher/descriptor.h"
#include "launcher/rank_stream.h"
#include "launcher/sink.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <sstream>
#include <string>
#include <string_view>

namespace tessera::launcher {

/// The beginning of each line of a rank: "[2] ", in the rank's colour on a terminal.
std::string rank_prefix(int rank, bool is_coloured);

/// Carries one stream of one rank, its stdout or stderr, from a pipe to a sink: line by line, each
/// with the prefix. Bytes pass unchanged, but for a line that would rewrite the one above it where
/// that is another's: it stands below. A line is held back until it is whole; past 64 MiB it
/// goes out in pieces of that size, or a rank that writes no newline would eat the memory.
class RankStream {
 public:
  RankStream(Descriptor pipe, Sink& sink, std::string prefix);

  int fd() const { return pipe_.get(); }

  /// Whether there is a reason to poll: neither at its end nor held up by a slow reader.
  bool wants_reading() const { return pipe_.is_open() && !sink_->is_full(); }

  /// Passes on at most one pipe's worth of bytes; call when poll says readable.
  void read_some();

  /// Passes on what is in the pipe at this moment, then a last line without its newline, and
  /// closes: processes that still hold the other end are not waited for.
  void finish();

  /// The last lines that came, without prefix, the oldest first; long ones are cut.
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  bool read_chunk(std::size_t limit);
  void take(std::string_view bytes);
  void pass_on(std::string_view line, bool add_newline);

  Descriptor pipe_;
  Sink* sink_;
  std::string prefix_;
  std::string partial_;
  std::size_t count_ = 0;  // the sink's, after the last line from here
  std::deque<std::string> last_lines_;
};

namespace {

constexpr std::size_t kReadSize = 1 << 16;
constexpr std::size_t kLongestPiece = std::size_t{64} << 20;
constexpr std::size_t kKeptLines = 20;
constexpr std::size_t kKeptLineLength = 2000;

// Readable on dark and light grounds; neighbours differ.
constexpr int kColours[] = {36, 33, 32, 35, 34, 96, 93, 92, 95, 94};

// The cursor goes up a line: progress that takes the place of what it said before.
constexpr std::string_view kRewrite = "\033[1A";

}  // namespace

std::string rank_prefix(int rank, bool is_coloured) {
  const int colour = kColours[static_cast<std::size_t>(rank) % std::size(kColours)];
  std::ostringstream text;
  if (is_coloured) text << "\033[" << colour << "m";
  text << "[" << rank << "]" << (is_coloured ? "\033[0m " : " ");
  return text.str();
}

RankStream::RankStream(Descriptor pipe, Sink& sink, std::string prefix)
    : pipe_(std::move(pipe)), sink_(&sink), prefix_(std::move(prefix)) {
  // Each end of a pipe has flags of its own: the rank's end still blocks, as programs expect.
  checked(::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK), "cannot read a rank's output");
}

void RankStream::read_some() { read_chunk(kReadSize); }

bool RankStream::read_chunk(std::size_t limit) {
  static char buffer[kReadSize];  // one thread reads all streams
  const ssize_t size = ::read(pipe_.get(), buffer, std::min(limit, kReadSize));
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (size <= 0) {
    pipe_.reset();
    return false;
  }
  take({buffer, static_cast<std::size_t>(size)});
  return true;
}

void RankStream::finish() {
  int available = 0;
  if (pipe_.is_open()) ::ioctl(pipe_.get(), FIONREAD, &available);
  while (available > 0 && read_chunk(static_cast<std::size_t>(available))) {
    available -= static_cast<int>(kReadSize);
  }
  pipe_.reset();
  // Without a prefix the bytes stay exactly the rank's; the sink begins a line for whoever is next.
  if (!partial_.empty()) pass_on(partial_, /*add_newline=*/!prefix_.empty());
  partial_.clear();
}

void RankStream::take(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto newline = bytes.find('\n');
    if (newline == std::string_view::npos) {
      partial_.append(bytes);
      if (partial_.size() < kLongestPiece) return;
      pass_on(partial_, /*add_newline=*/true);
      partial_ = std::string();
      return;
    }
    if (partial_.empty()) {
      pass_on(bytes.substr(0, newline + 1), /*add_newline=*/false);
    } else {
      partial_.append(bytes.substr(0, newline + 1));
      pass_on(partial_, /*add_newline=*/false);
      partial_ = std::string();
    }
    bytes.remove_prefix(newline + 1);
  }
}

void RankStream::pass_on(std::string_view line, bool add_newline) {
  std::string whole = prefix_;
  const bool would_erase = line.starts_with(kRewrite) && sink_->count() != count_;
  whole.append(would_erase ? line.substr(kRewrite.size()) : line);
  if (add_newline) whole.push_back('\n');
  sink_->append(whole);
  count_ = sink_->count();

  if (line.ends_with('\n')) line.remove_suffix(1);
  // libtorch prints dozens of these behind a message; as last words the message alone will do.
  if (line.starts_with("frame #")) return;
  if (line.starts_with(kRewrite)) return;  // told again, it would erase what stands above
  std::string kept;
  if (last_lines_.size() == kKeptLines) {
    kept = std::move(last_lines_.front());  // its memory serves again: floods come through here
    last_lines_.pop_front();
  }
  kept.assign(line.substr(0, kKeptLineLength));
  if (line.size() > kKeptLineLength) kept += "…";
  last_lines_.push_back(std::move(kept));
}

/// One output of the launcher (its stdout, its stderr, or both when they are the same file).
/// It queues text and writes as much as the reader takes, so that a slow reader never blocks the
/// launcher; `is_full` is the sign to stop reading from the ranks until the queue has drained.
class Sink {
 public:
  explicit Sink(int fd);

  /// Queues whole lines, or the last piece of a stream that ended without a newline: the next text
  /// then begins on a line of its own.
  void append(std::string_view text);

  /// Writes what can be written without waiting, a bounded amount per call.
  void write_some();

  int fd() const { return nonblocking_.is_open() ? nonblocking_.get() : fd_; }
  bool has_pending() const { return sent_ < pending_.size(); }
  bool is_full() const;
  /// How many texts were queued so far.
  std::size_t count() const { return count_; }
  bool is_coloured() const { return is_coloured_; }

  /// The reader has gone (`tessera run … | head`); everything queued is dropped from then on.
  bool is_broken() const { return is_broken_; }

  /// Drops what is queued.
  void discard();

 private:
  int fd_;
  Descriptor nonblocking_;  // the same file opened once more, where that is possible
  std::string pending_;
  std::size_t sent_ = 0;
  std::size_t count_ = 0;
  std::size_t chunk_;
  bool is_coloured_;
  bool is_broken_ = false;
  bool at_line_start_ = true;
};

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

namespace {

bool same_file(int one, int other) {
  struct stat first;
  struct stat second;
  return ::fstat(one, &first) == 0 && ::fstat(other, &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

}  // namespace

Output::Output() : out_(std::make_shared<Sink>(STDOUT_FILENO)) {
  const bool shared = same_file(STDOUT_FILENO, STDERR_FILENO);
  err_ = shared ? out_ : std::make_shared<Sink>(STDERR_FILENO);
}

void Output::say(std::string_view message) {
  err_->append("tessera run: " + std::string(message) + "\n");
}

void Output::add_pending(std::vector<pollfd>& fds) const {
  if (out_->has_pending()) fds.push_back({out_->fd(), POLLOUT, 0});
  if (err_ != out_ && err_->has_pending()) fds.push_back({err_->fd(), POLLOUT, 0});
}

void Output::write_some() {
  out_->write_some();
  if (err_ != out_) err_->write_some();
}

}  // namespace tessera::launcher
