#include "support/sub_tests.h"

#include <tessera/comm.h>

#include <gtest/gtest.h>

#include <sstream>
#include <stdexcept>

namespace tessera::testing {

std::string SubTest::text() const {
  std::ostringstream out;
  out << std::boolalpha;
  const char* separator = "";
  for (const auto& [name, value] : values_) {
    out << separator << name << "=";
    std::visit([&out](const auto& held) { out << held; }, value);
    separator = ", ";
  }
  return out.str();
}

const SubTestValue& SubTest::value(std::string_view name) const {
  for (const auto& [known, value] : values_) {
    if (known == name) return value;
  }
  throw std::out_of_range("SubTest: no argument '" + std::string(name) + "' in {" + text() + "}");
}

std::vector<SubTest> sub_tests(const SubTestArguments& arguments) {
  std::vector<std::vector<std::pair<std::string, SubTestValue>>> combinations(1);
  for (const auto& [name, values] : arguments) {
    std::vector<std::vector<std::pair<std::string, SubTestValue>>> longer;
    for (const auto& combination : combinations) {
      for (const SubTestValue& value : values) {
        longer.push_back(combination);
        longer.back().emplace_back(name, value);
      }
    }
    combinations = std::move(longer);
  }
  std::vector<SubTest> result;
  for (auto& combination : combinations) result.emplace_back(std::move(combination));
  return result;
}

void run_sub_tests(const SubTestArguments& arguments,
                   const std::function<void(const SubTest&)>& body) {
  for (const SubTest& sub_test : sub_tests(arguments)) {
    SCOPED_TRACE("sub-test " + sub_test.text());
    try {
      body(sub_test);
    } catch (const std::exception& error) {
      // Told here, where the combination is known; rethrown, because the ranks are no longer in
      // step.
      ADD_FAILURE() << "sub-test {" << sub_test.text() << "} threw";
      throw;
    }
    if (is_initialized()) barrier();
  }
}

}  // namespace tessera::testing
