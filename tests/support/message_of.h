#pragma once

#include <c10/util/Exception.h>

#include <concepts>
#include <functional>
#include <string>

namespace tessera::testing {

/// Text of the `E` that `call` throws, without backtrace; says so if it returns or throws another.
template <std::derived_from<c10::Error> E>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("another kind of exception: ") + error.what();
  }
  return "no exception";
}

}  // namespace tessera::testing
