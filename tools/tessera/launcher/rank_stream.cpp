#include "launcher/rank_stream.h"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <sstream>

namespace tessera::launcher {
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

}  // namespace tessera::launcher
