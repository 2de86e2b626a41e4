#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// "3.5 MiB", "17 B".
std::string format_bytes(size_t bytes);
/// "0, 2 and 3"; "none" if empty.
std::string format_list(const std::vector<int>& numbers);
/// "rank 1", "ranks 0, 2 and 3".
std::string format_ranks(const std::vector<int>& ranks);
/// "'a', 'b' and 'c'", at most twelve of them, printable; "none" if empty.
std::string format_list(const std::vector<std::string>& names);
/// The names that differ least from a misspelt one, at most three.
std::vector<std::string> nearest_names(const std::string& name, std::vector<std::string> names);
/// "1.25 s", "30 ms".
std::string format_seconds(double seconds);

/// A text that others wrote, such as a name in a file, so that a terminal shows it and does nothing
/// else: control characters, marks that turn the direction of writing, and bytes that are no UTF-8
/// become "\x1b", "\n"; those in `kept` stay. Given twice it changes nothing more.
std::string printable(std::string_view text, std::string_view kept = "");

}  // namespace tessera
