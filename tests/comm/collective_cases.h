#pragma once

#include <tessera/comm.h>

#include "comm/shm/channel.h"
#include "comm/shm/member.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <iosfwd>
#include <string>
#include <vector>

/// One call of every collective, with a rank that something happens to in the middle.
namespace tessera::comm::shm {

using Tensors = std::vector<at::Tensor>;

inline constexpr int64_t kSmall = 100;
inline constexpr int64_t kLarge = int64_t{1} << 18;  // 1 MiB: several rounds

/// What `rank` contributes: whole numbers, so that sums are exact.
at::Tensor sample(int rank, int64_t count);
at::Tensor shared_sample(int rank, int64_t count);
void expect_same(const at::Tensor& actual, const at::Tensor& expected);
/// Sums this rank's sample in the world and checks the result.
void call_all_reduce(at::Tensor tensor);

struct CollectiveCase {
  std::string name;
  std::string operation;  // as errors call it
  int ranks;
  int victim;
  int occurrence;            // which Filled or Posted of the call is meant
  std::vector<int> readers;  // ranks that can't complete the call ...
  Phase last;                // ... if the victim gets no further than this
  void (*call)();            // in the world; checks the result
};
void PrintTo(const CollectiveCase& collective, std::ostream* out);  // NOLINT: gtest's name

std::vector<CollectiveCase> collective_cases();
/// The phases that a case goes through; a barrier has no data.
std::vector<Phase> phases_of(const CollectiveCase& collective);
std::string name_of(Phase phase);
/// Whether the rank must not get a result when the victim gets no further than `phase`.
bool must_fail(const CollectiveCase& collective, Phase phase, int rank);

/// From now on the process sends itself the signal when its collective `sequence` reaches the
/// phase.
void set_trap(const CollectiveCase& collective, Phase phase, uint64_t sequence, int signal);

}  // namespace tessera::comm::shm
