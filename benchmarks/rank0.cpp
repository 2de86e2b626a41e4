#include "rank0.h"

#include <tessera/comm.h>

#include <c10/util/Exception.h>

namespace tessera::benchmarks {
namespace {

constexpr char kDone = '+';
constexpr char kFailed = '-';

}  // namespace

std::string on_rank0(const std::function<std::string()>& work) {
  std::string verdict;
  if (rank() == 0) {
    try {
      verdict = kDone + work();
    } catch (...) {
      broadcast_bytes(std::string(1, kFailed));
      throw;
    }
  }
  verdict = broadcast_bytes(verdict);
  if (verdict.front() == kFailed) throw StoppedByRank0();
  return verdict.substr(1);
}

void stop_all(const std::string& message) {
  if (rank() != 0) throw StoppedByRank0();
  C10_THROW_ERROR(Error, message);
}

}  // namespace tessera::benchmarks
