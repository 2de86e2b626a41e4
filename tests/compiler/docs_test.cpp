// What docs/compiler.md shows of the compiler is what the compiler reads and writes.
#include "compiler/ir/verify.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace tessera::compiler {
namespace {

/// The first block of code without a language that follows this heading of the page.
std::string block_after(const std::string& heading) {
  std::ostringstream page;
  page << std::ifstream(TESSERA_COMPILER_PAGE).rdbuf();
  const std::string text = page.str();
  const std::string open = "\n```\n";
  const auto section = text.find("\n" + heading + "\n");
  const auto begin = text.find(open, section);
  const auto end = text.find("```", begin + open.size());
  if (section == std::string::npos || begin == std::string::npos || end == std::string::npos) {
    ADD_FAILURE() << "no block of code after '" << heading << "' in " << TESSERA_COMPILER_PAGE;
    return {};
  }
  return text.substr(begin + open.size(), end - begin - open.size());
}

TEST(CompilerPage, ShowsAGraphAsItIsPrinted) {
  const auto sample = block_after("## Graph");
  const auto graph = Graph::parse(sample);
  EXPECT_EQ(graph.str(), sample);
  EXPECT_NO_THROW(verify(graph, "the page"));
  EXPECT_GT(graph.nodes.size(), 4U);
}

}  // namespace
}  // namespace tessera::compiler
