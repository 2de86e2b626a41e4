#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::testing {

/// Text of the error of this type that `call` throws; "" and a failure if none.
template <class Error = c10::ValueError, class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    EXPECT_NE(dynamic_cast<const Error*>(&error), nullptr) << error.what_without_backtrace();
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace tessera::testing
