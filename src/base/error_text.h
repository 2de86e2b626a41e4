#pragma once

#include <exception>
#include <string>

namespace tessera {

/// What an exception says, without libtorch's backtrace.
std::string text_of(const std::exception_ptr& error);

}  // namespace tessera
