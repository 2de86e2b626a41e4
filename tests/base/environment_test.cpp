#include "base/environment.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Environment, TreatsAnEmptyVariableAsUnset) {
  const Environment environment({{"EMPTY", ""}, {"FULL", "x"}});
  EXPECT_FALSE(environment.has("EMPTY"));
  EXPECT_FALSE(environment.has("ABSENT"));
  EXPECT_EQ(environment.get("FULL"), "x");
}

TEST(Environment, NamesTheVariableThatIsNoInteger) {
  const Environment environment({{"RANK", "2x"}, {"SIZE", "-3"}});
  EXPECT_EQ(environment.get_int("SIZE"), -3);
  EXPECT_EQ(environment.get_int("ABSENT"), std::nullopt);
  try {
    environment.get_int("RANK");
    FAIL() << "expected a ValueError";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), AllOf(HasSubstr("RANK"), HasSubstr("'2x'")));
  }
}

TEST(Environment, ReadsWholeIntegersOnly) {
  EXPECT_EQ(parse_int("42"), 42);
  for (const char* text : {"", " 1", "1 ", "0x10", "1.0", "99999999999999999999"}) {
    EXPECT_EQ(parse_int(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace tessera
