#pragma once

#include <exception>
#include <functional>
#include <string>

namespace tessera::benchmarks {

/// Thrown on the other ranks when rank 0 throws what there is to say: they leave in peace, so that
/// the launcher reports the rank that speaks.
class StoppedByRank0 : public std::exception {
 public:
  const char* what() const noexcept override { return "rank 0 has stopped"; }
};

/// Runs `work` on rank 0 while the others sleep, and gives its text to all. If it throws, all stop.
/// Every rank calls it.
std::string on_rank0(const std::function<std::string()>& work);

/// For what all ranks find wrong alike: rank 0 throws c10::Error with this message, the others
/// StoppedByRank0.
[[noreturn]] void stop_all(const std::string& message);

}  // namespace tessera::benchmarks
