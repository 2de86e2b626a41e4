#pragma once

#include "support/ranks.h"

#include <chrono>
#include <string>
#include <vector>

namespace tessera::testing {

/// Ranks that are forked instead of started: a world takes a few milliseconds, so a test can afford
/// one per place in which a rank may die.
struct ForkedWorld {
  std::string name;  // in failures, and of its store's file
  int ranks = 2;
  RankBody body = {};             // in every rank, between init and shutdown
  std::vector<int> may_die = {};  // ranks that may end by a signal
  InitOptions options = {};       // apart from rank, world size and store
};

/// Runs the worlds in a process of its own (one run, see run_processes), `at_once` at a time.
/// Failures, exceptions and unforeseen ends of ranks become failures of the calling test. A rank
/// that stops itself (SIGSTOP) is resumed once all others of its world have ended.
void run_forked_worlds(const std::vector<ForkedWorld>& worlds, int at_once = 3,
                       std::chrono::milliseconds deadline = std::chrono::seconds(60));

}  // namespace tessera::testing
