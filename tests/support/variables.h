#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

/// Sets variables of the process, and puts them back.
class Variables {
 public:
  explicit Variables(const std::vector<std::pair<std::string, std::string>>& wanted) {
    for (const auto& [name, value] : wanted) {
      const char* old = std::getenv(name.c_str());
      old_[name] = old == nullptr ? std::nullopt : std::optional<std::string>(old);
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  ~Variables() {
    for (const auto& [name, value] : old_) {
      if (value) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }

 private:
  std::map<std::string, std::optional<std::string>> old_;
};

}  // namespace tessera::testing
