#include "comm/store_exchange.h"

#include "base/error_text.h"
#include "base/text.h"
#include "comm/diagnostics.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Keys = std::vector<std::string>;  // by rank

/// How often a rank that waits looks whether its peers still live.
constexpr milliseconds kHealthCheck{500};

std::string key_of(const std::string& topic, int rank) { return c10::str(topic, "/", rank); }

std::vector<int> missing_ranks(c10d::Store& store, const Keys& keys) {
  std::vector<int> missing;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (!store.check({keys[rank]})) missing.push_back(static_cast<int>(rank));
  }
  return missing;
}

/// Throws if a process that has not set its key has ended, or is stopped for too long.
void check_processes(const StoreGroup& group, const Keys& keys) {
  for (size_t rank = 0; rank < group.processes.size(); ++rank) {
    const auto& process = group.processes[rank];
    if (!process || !process->has_exited()) continue;
    TORCH_CHECK(group.store.check({keys[rank]}), "rank ", rank, " (process ", process->pid(),
                ") has ended; look at its own output for the cause");
  }
  for (size_t rank = 0; rank < group.processes.size(); ++rank) {
    const auto& process = group.processes[rank];
    const auto problem = process ? process->find_stop(c10::str("rank ", rank), "") : std::nullopt;
    if (problem) TORCH_CHECK(group.store.check({keys[rank]}), *problem);
  }
}

void await(const StoreGroup& group, const Keys& keys) {
  const auto since = Clock::now();
  const auto deadline = since + group.timeout;
  bool is_told = false;
  while (true) {
    const auto begun = Clock::now();
    const auto left = std::chrono::ceil<milliseconds>(deadline - begun);
    try {
      return group.store.wait(keys, std::clamp(left, milliseconds(1), kHealthCheck));
    } catch (const std::exception&) {
      // Earlier than it was to: not a timeout, the store itself has failed.
      if (left <= kHealthCheck || Clock::now() < begun + kHealthCheck) throw;
    }
    check_processes(group, keys);
    if (!is_late(since) || std::exchange(is_told, true)) continue;
    const auto missing = missing_ranks(group.store, keys);
    const bool is_first =
        std::cmp_equal(std::ranges::count_if(missing, [&](int rank) { return rank < group.rank; }),
                       group.rank);  // of those who are here; one is enough
    if (is_first && !missing.empty())
      tell_late(c10::str("rank ", group.rank), format_ranks(missing), since, group.caller,
                deadline);
  }
}

}  // namespace

std::vector<std::string> exchange(const StoreGroup& group, const std::string& topic,
                                  const std::string& value) {
  auto& store = group.store;
  Keys keys;
  for (int rank = 0; rank < group.size; ++rank) keys.push_back(key_of(topic, rank));
  tell(group, topic, value);
  // Set by whoever gave up: a rank that comes too late must not think that all are there.
  const auto given_up = topic + "/given up";
  try {
    await(group, keys);
    TORCH_CHECK(!store.check({given_up}), "another rank has given up waiting");
  } catch (const std::exception&) {
    const auto reason = text_of(std::current_exception());
    std::vector<int> missing;
    try {
      store.set(given_up, std::vector<uint8_t>{1});
      missing = missing_ranks(store, keys);
    } catch (const std::exception&) {
      // The store itself is gone; its own words are all there is.
    }
    TORCH_CHECK_WITH(
        DistBackendError, false, group.caller, ": expected ", group.size, " ranks within ",
        format_seconds(static_cast<double>(group.timeout.count()) / 1e3), ", rank ", group.rank,
        missing.empty() ? " can't go on" : " still misses " + format_ranks(missing),
        "; did every rank get here, with the same world size and store? (", reason, ")");
  }
  std::vector<std::string> answers;
  for (const auto& key : keys) answers.push_back(store.get_to_str(key));
  return answers;
}

void tell(const StoreGroup& group, const std::string& topic, const std::string& value) {
  group.store.set(key_of(topic, group.rank), std::vector<uint8_t>(value.begin(), value.end()));
}

}  // namespace tessera::comm
