#pragma once

#include "state/files/file_name.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// JSON from files that may be damaged or hostile.
namespace tessera::state {

using Json = nlohmann::json;

/// Throws a ValueError if the text is no JSON, has a key twice, nests deeper than anything we read
/// does, or has more values than `max_values`.
Json parse_json(const FileName& file, std::string_view text, size_t max_values = 10'000'000);

/// JSON text of a value; a ValueError if a string in it is not UTF-8.
std::string to_text(const std::string& function, const Json& value);

/// The field of this name; a ValueError that says `where` it is missing, or of another type.
const Json& object_field(const FileName& file, const Json& object, const char* name,
                         std::string_view where);
const Json& array_field(const FileName& file, const Json& object, const char* name,
                        std::string_view where);
std::string string_field(const FileName& file, const Json& object, const char* name,
                         std::string_view where);
uint64_t count_field(const FileName& file, const Json& object, const char* name,
                     std::string_view where);
/// A list of numbers from 0 to the largest int64_t, at most 64 of them: a shape or an offset.
std::vector<int64_t> sizes_field(const FileName& file, const Json& object, const char* name,
                                 std::string_view where);

}  // namespace tessera::state
