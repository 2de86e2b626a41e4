#include "base/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <utility>

namespace tessera {

Environment::Environment(std::map<std::string, std::string> variables)
    : variables_(std::move(variables)) {}

std::optional<std::string> Environment::get(const std::string& name) const {
  std::string value;
  if (variables_) {
    auto found = variables_->find(name);
    if (found != variables_->end()) value = found->second;
  } else if (const char* text = std::getenv(name.c_str())) {
    value = text;
  }
  return value.empty() ? std::nullopt : std::optional(std::move(value));
}

std::optional<int64_t> Environment::get_int(const std::string& name) const {
  auto text = get(name);
  if (!text) return std::nullopt;
  auto value = parse_int(*text);
  TORCH_CHECK_VALUE(value, "environment variable ", name, ": expected an integer, got '", *text,
                    "'");
  return value;
}

std::optional<int64_t> parse_int(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

}  // namespace tessera
