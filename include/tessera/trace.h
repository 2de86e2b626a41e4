#pragma once

#include <cstdint>
#include <vector>

/// Where a rank's time goes: the thread that trains, on which backward runs too (on the CPU).
namespace tessera {

enum class SpanKind { Data, Forward, Backward, Optimizer, Communication, Wait, Other };
/// "data", "forward", …
const char* name_of(SpanKind kind);

struct SpanRecord {
  SpanKind kind;
  const char* name;
  int64_t detail;  // Communication: bytes. Wait: the rank waited for, in the world. Else -1
  int64_t begin;   // nanoseconds of the monotonic clock, which all processes of a host share
  int64_t end;
};

/// A named piece of this thread's time, from construction to the end of the scope. `name` has to
/// stay valid. Collectives and waits of this library make their own.
class Span {
 public:
  Span(SpanKind kind, const char* name, int64_t detail = -1);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  SpanRecord record_;
  bool is_counted_;  // the outermost of Communication
};

/// Keeps the spans of this thread that end while it lives. One at a time per thread.
class SpanRecorder {
 public:
  SpanRecorder();
  ~SpanRecorder();
  SpanRecorder(const SpanRecorder&) = delete;
  SpanRecorder& operator=(const SpanRecorder&) = delete;

  /// In the order in which they ended; forgets them.
  std::vector<SpanRecord> take();

 private:
  std::vector<SpanRecord> records_;
  friend class Span;
};

/// Seconds that this thread has spent in collectives, at work in them or waiting for other ranks.
double communication_seconds();

}  // namespace tessera
