#pragma once

#include <string>
#include <string_view>
#include <vector>

/// Names of modules and patterns for them. Knows nothing of modules.
namespace tessera::parallel {

/// "blocks.*.up" -> "blocks", "*", "up"; none for "".
std::vector<std::string> split_components(const std::string& pattern);

/// Whether a component matches a whole name: `*` any characters, `?` one, `[a-c]` one of these,
/// `[!a-c]` one of the others; a bracket that is not closed stands for itself. Case counts.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace tessera::parallel
