#pragma once

#include "adopt/rewrite.h"

#include <string>
#include <vector>

namespace tessera::adopt {

/// What the edits change, as `diff -u` writes it, with three lines around; `patch -p1` applies it.
std::string unified_diff(const std::string& name, const std::string& text,
                         const std::vector<Edit>& edits);

/// For a terminal: colours, and no byte that would do something else.
std::string coloured(const std::string& diff);

}  // namespace tessera::adopt
