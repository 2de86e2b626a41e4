#pragma once

#include <CLI/CLI.hpp>

#include <charconv>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// Numbers of command lines, files and variables. CLI11's own conversion rounds floating-point
/// numbers twice (by way of long double), takes 010 for 8, and tells of its types.
namespace tessera::tool {

/// The finite number that the whole of `text` is, to the nearest T; none if it is anything else.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) return std::nullopt;
  }
  return value;
}

/// The shortest text that parse_number reads as the same number.
template <class T>
std::string number_text(T number) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

/// Accepts numbers from `least` to `most`; of others it says what was expected.
template <class T>
CLI::Validator number_between(T least, T most) {
  const auto check = [=](std::string& text) -> std::string {
    const auto value = parse_number<T>(text);
    if (value && *value >= least && *value <= most) return {};
    std::ostringstream message;
    message << "expected a number from " << least << " to " << most << ", got '" << text << "'";
    if (value) message << "; the nearest is " << (*value > most ? most : least);
    return message.str();
  };
  return {check, ""};
}

/// An option for a number from `least` to `most`; its default is what `value` holds.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& name, T& value,
                        std::type_identity_t<T> least, std::type_identity_t<T> most,
                        const std::string& help) {
  const auto read = [&value](const CLI::results_t& words) {
    value = *parse_number<T>(words.back());
    return true;
  };
  return app
      .add_option(name, read, help, /*defaulted=*/true, [&value] { return number_text(value); })
      ->type_name(CLI::detail::type_name<T>())
      ->check(number_between<T>(least, most));
}

/// The same for one or more numbers, with commas or blanks between.
template <class T>
CLI::Option* add_numbers(CLI::App& app, const std::string& name, std::vector<T>& values,
                         std::type_identity_t<T> least, std::type_identity_t<T> most,
                         const std::string& help) {
  const auto read = [&values](const CLI::results_t& words) {
    values.clear();
    for (const auto& word : words) values.push_back(*parse_number<T>(word));
    return true;
  };
  const auto defaults = [&values] {
    std::string text;
    for (const auto value : values) text += (text.empty() ? "" : ",") + number_text(value);
    return text;
  };
  return app.add_option(name, read, help, /*defaulted=*/true, defaults)
      ->type_name(CLI::detail::type_name<T>())
      ->expected(CLI::detail::expected_max_vector_size)
      ->delimiter(',')
      ->check(number_between<T>(least, most));
}

}  // namespace tessera::tool
