#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::testing {

/// Text of the error of this type that `call` throws, without backtrace; a failure and "" if it
/// throws none, or another.
template <class Error = c10::ValueError, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected another type of exception than that of: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace tessera::testing
