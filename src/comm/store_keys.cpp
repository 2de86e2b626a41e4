#include "comm/store_keys.h"

#include "base/text.h"

#include <c10/util/Exception.h>

namespace tessera::comm {
namespace {

std::vector<int> missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<int> missing;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (!store.check({keys[rank]})) missing.push_back(static_cast<int>(rank));
  }
  return missing;
}

}  // namespace

std::vector<std::string> exchange(c10d::Store& store, const std::string& topic, int rank, int size,
                                  const std::string& value, std::chrono::milliseconds timeout,
                                  const std::string& caller) {
  std::vector<std::string> keys;
  for (int peer = 0; peer < size; ++peer) keys.push_back(topic + "/" + std::to_string(peer));
  store.set(keys[rank], std::vector<uint8_t>(value.begin(), value.end()));
  // Set by whoever gave up: a rank that comes too late must not think that all are there.
  const auto given_up = topic + "/given up";
  try {
    store.wait(keys, timeout);
    TORCH_CHECK(!store.check({given_up}), "another rank has given up waiting");
  } catch (const std::exception& error) {
    std::vector<int> missing;
    try {
      store.set(given_up, std::vector<uint8_t>{1});
      missing = missing_ranks(store, keys);
    } catch (const std::exception&) {
      // The store itself is gone; its own words are all there is.
    }
    TORCH_CHECK_WITH(
        DistBackendError, false, caller, ": expected ", size, " ranks within ",
        format_seconds(static_cast<double>(timeout.count()) / 1e3), ", rank ", rank,
        " still misses ", missing.empty() ? "the store" : "rank " + format_list(missing),
        "; did every rank get here, with the same world size and store? (", error.what(), ")");
  }
  std::vector<std::string> answers;
  for (const auto& key : keys) {
    const auto bytes = store.get(key);
    answers.emplace_back(bytes.begin(), bytes.end());
  }
  return answers;
}

}  // namespace tessera::comm
