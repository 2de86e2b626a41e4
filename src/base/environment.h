#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace tessera {

/// Variables by name: the process's, or a test's own.
class Environment {
 public:
  Environment() = default;
  explicit Environment(std::map<std::string, std::string> variables);

  /// None if the variable is unset or empty.
  std::optional<std::string> get(const std::string& name) const;
  /// Throws ValueError naming variable and value if it is no integer.
  std::optional<int64_t> get_int(const std::string& name) const;
  bool has(const std::string& name) const { return get(name).has_value(); }

 private:
  std::optional<std::map<std::string, std::string>> variables_;  // none: the process's
};

/// The whole of `text` as an integer; none if it is anything else.
std::optional<int64_t> parse_int(const std::string& text);

}  // namespace tessera
