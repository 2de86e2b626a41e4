#pragma once

#include <chrono>
#include <string>

/// Waits that are long: nothing is wrong yet, but a user who looks should see who is waited for.
namespace tessera::comm {

/// Whether a wait that began at `since` is to be told of, once: 30 s old (TESSERA_LATE_AFTER in
/// seconds; 0: never).
bool is_late(std::chrono::steady_clock::time_point since) noexcept;

/// "tessera: rank 0 has waited 30 s for rank 1: barrier #1 in group 'world'; it gives up after …",
/// on standard error.
void tell_late(const std::string& waiting, const std::string& awaited,
               std::chrono::steady_clock::time_point since, const std::string& what,
               std::chrono::steady_clock::time_point deadline);

/// From now on `signal` makes this process write its recent collectives to standard error. 0, or a
/// signal the program handles itself: nothing. The handler only wakes a thread that does the
/// writing.
void dump_on_signal(int signal);

}  // namespace tessera::comm
