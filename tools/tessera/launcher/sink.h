#pragma once

#include "launcher/descriptor.h"

#include <string>
#include <string_view>

namespace tessera::launcher {

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

}  // namespace tessera::launcher
