#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>

namespace tessera::report {

/// What the user has to hear; the text says what was expected, what came and what to do.
class ReportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What stands in a file; none if there is no such file. Throws ReportError if it cannot be read,
/// is no plain file (a pipe would never end) or is larger than `most_bytes`.
std::optional<std::string> read_file(const std::filesystem::path& file, std::size_t most_bytes);

/// Writes a file so that an earlier one of its name stays whole until the new one is complete.
void write_file(const std::filesystem::path& file, const std::string& text);

/// Parses JSON that is nested at most 64 deep, since later steps recurse. Throws a std::exception
/// if it is not.
template <class Json = nlohmann::json>
Json parse_json(const std::string& text) {
  constexpr int kDeepest = 64;
  return Json::parse(text, [](int depth, auto /*event*/, auto& /*value*/) {
    if (depth > kDeepest) throw ReportError("nested too deep");
    return true;
  });
}

/// "1.4 MB"
std::string size_text(std::size_t bytes);

}  // namespace tessera::report
