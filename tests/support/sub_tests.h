#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::testing {

using SubTestValue = std::variant<bool, int64_t, double, std::string>;

/// Argument names with their values; the last name varies fastest.
using SubTestArguments = std::vector<std::pair<std::string, std::vector<SubTestValue>>>;

/// One combination of values.
class SubTest {
 public:
  explicit SubTest(std::vector<std::pair<std::string, SubTestValue>> values)
      : values_(std::move(values)) {}

  /// T: bool, an integer, double or std::string, as given. Throws for an unknown name or another
  /// type.
  template <class T>
  T get(std::string_view name) const {
    if constexpr (std::integral<T> && !std::same_as<T, bool>) {
      return static_cast<T>(std::get<int64_t>(value(name)));
    } else {
      return std::get<T>(value(name));
    }
  }
  /// "bias=true, rows=3".
  std::string text() const;

 private:
  const SubTestValue& value(std::string_view name) const;

  std::vector<std::pair<std::string, SubTestValue>> values_;
};

/// The Cartesian product, in order.
std::vector<SubTest> sub_tests(const SubTestArguments& arguments);

/// Runs `body` for every combination within the same ranks, with a barrier of the world after each
/// (if there is one); failures name the combination:
///   run_sub_tests({{"bias", {true, false}}, {"rows", {1, 3}}}, [](const SubTest& t) { …
///   t.get<bool>("bias") … });
void run_sub_tests(const SubTestArguments& arguments,
                   const std::function<void(const SubTest&)>& body);

}  // namespace tessera::testing
