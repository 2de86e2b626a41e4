#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera {

/// "3.5 MiB", "17 B".
std::string format_bytes(size_t bytes);
/// "0, 2 and 3"; "none" if empty.
std::string format_list(const std::vector<int>& numbers);
/// "'a', 'b' and 'c'", at most twelve of them; "none" if empty.
std::string format_list(const std::vector<std::string>& names);
/// "1.25 s", "30 ms".
std::string format_seconds(double seconds);

}  // namespace tessera
