#pragma once

#include <tessera/comm.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>

namespace tessera::comm {

/// Text of the DistBackendError that `call` throws; empty if it returns.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// As error_of, for a call and the barriers after it: a rank may have what it needs for some.
/// The error must come within 10 seconds. `calls` that did not throw are counted.
inline std::string first_error_of(const std::function<void()>& call, int* calls = nullptr) {
  constexpr int kMost = 10;
  const auto begun = std::chrono::steady_clock::now();
  auto error = error_of(call);
  int passed = 0;
  for (; error.empty() && passed < kMost; ++passed) error = error_of([] { barrier(); });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
  if (calls != nullptr) *calls = passed;
  return error;
}

}  // namespace tessera::comm
