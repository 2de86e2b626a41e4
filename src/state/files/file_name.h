#pragma once

#include "base/text.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <string_view>

namespace tessera::state {

/// A file and the public function that works on it: how messages begin.
struct FileName {
  std::string function;
  std::string path;

  template <class... Words>
  [[noreturn]] void refuse(const Words&... words) const {
    TORCH_CHECK_VALUE(false, printable(c10::str(function, ": ", path, ": ", words...)));
    std::abort();  // not reached: the check throws
  }
  template <class... Words>
  void require(bool holds, const Words&... words) const {
    if (!holds) refuse(words...);
  }
};

/// A name from a file that may be hostile, for a message: not long.
inline std::string in_quotes(const std::string& name) {
  constexpr size_t kMost = 200;
  const auto shown = std::string_view(name).substr(0, kMost);
  return c10::str("'", shown, shown.size() < name.size() ? "…'" : "'");
}

}  // namespace tessera::state
