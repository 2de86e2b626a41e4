#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::compiler {

/// Note [recorded again]
/// Guards see what they are told of, and a step may read anything: a number that a lambda captures
/// by reference, what lies behind a pointer. So now and then a call for which there is a program
/// runs eagerly and is recorded, as the first was: its results are right whatever has changed, and
/// a recording that differs tells of the change. This is so at calls 8, 16, … 256 after a program
/// was made, and from then on after so many calls that it costs less than 1 % of their time; of
/// several programs, as many calls in a row. All ranks record the same calls: they count calls of
/// the step, whichever program serves them, and agree on the interval.
class Recheck {
 public:
  /// Whether the next call is to be recorded.
  bool is_due() const { return programs_ > 0 && calls_ + 1 >= next_; }
  int64_t calls() const { return calls_; }  // since a program was made
  /// One was made; `most` are kept.
  void add_program(int64_t most);
  void drop_program() { programs_ = std::max<int64_t>(programs_ - 1, 0); }
  /// A program ran.
  void note_run(double seconds);
  /// Of this rank: calls until the next, if an eager one takes so long.
  int64_t interval(double recorded_seconds) const;
  /// The function still does what the program does; `interval` is the longest of all ranks.
  void pass(int64_t interval);

 private:
  static constexpr int64_t kFirst = 8, kSteady = 256;
  int64_t calls_ = 0, next_ = kFirst;
  int64_t programs_ = 0, passed_ = 0;
  double seconds_ = 0;        // of runs since the last time, but for the first
  double first_seconds_ = 0;  // of the first, which may have to be captured again
  int64_t runs_ = 0;
};

}  // namespace tessera::compiler
