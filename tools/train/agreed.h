#pragma once

#include "train/settings.h"

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

/// Failures that all ranks know of, so that one of them can tell and all end alike.
namespace tessera::train {

class AgreedError : public std::runtime_error {
 public:
  explicit AgreedError(const std::string& message, int exit_code = kAgreedFailure)
      : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// A failure of this rank, after what was running is put in order: how it ends.
class RankError : public std::runtime_error {
 public:
  RankError(const std::string& message, int exit_code)
      : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// Without libtorch's backtrace.
std::string message_of(const std::exception& error);

/// Throws an AgreedError (wrong settings) on all ranks if one of them has a problem: the first that
/// is not empty, with its rank unless all have it. Every rank calls it.
void refuse_together(const std::string& problem);

/// What `make` returns; if it throws on one rank, all end. Every rank calls it, `make` talks to
/// nobody.
template <class F>
auto agree(F make) {
  std::optional<decltype(make())> made;
  std::string problem;
  try {
    made.emplace(make());
  } catch (const std::exception& error) {
    problem = message_of(error);
  }
  refuse_together(problem);
  return std::move(*made);
}

}  // namespace tessera::train
