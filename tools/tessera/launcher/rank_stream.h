#pragma once

#include "launcher/descriptor.h"
#include "launcher/sink.h"

#include <deque>
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

}  // namespace tessera::launcher
