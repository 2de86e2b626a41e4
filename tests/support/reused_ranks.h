#pragma once

#include "support/rank_options.h"

#include <string>

/// Rank processes that live through several runs of a test binary (TESSERA_REUSE_RANKS=1).
namespace tessera::testing {

/// Whether the variable asks for it and this run allows it.
bool reuses_ranks(const RankOptions& options);

/// In the parent: the run `call` of the test with processes of an earlier run, or new ones if none
/// fit. Reports to the calling test.
void run_reused(const std::string& test, int call, int n, const RankOptions& options);
/// Lets all processes that wait for a run exit. A failure, which names the rank, for each that did
/// not exit with 0, those that had to go earlier among them.
void end_reused_ranks();

/// In a rank: whether it is one of these.
bool is_reused_rank();
/// The whole life of such a process: one run after the other until its parent says that there is
/// none left. The exit code of the process.
int serve_runs();
/// The body has ended with this code: unwinds the test.
[[noreturn]] void end_reused_run(int code);

}  // namespace tessera::testing
