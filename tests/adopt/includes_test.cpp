// Where #include <tessera/nn.h> goes, and what several files know of each other.
#include "adopt/adopted.h"

#include <gtest/gtest.h>

using tessera::test::adopt_files;
using tessera::test::Files;

namespace {

const std::string kUse = "torch::nn::Linear a;\n";
const std::string kUsed = "tessera::nn::Linear a;\n";
const std::string kNew = "#include <tessera/nn.h>\n";

std::string whole(const std::string& text) {
  return adopt_files({{"a.cpp", text}}).files.at("a.cpp");
}

}  // namespace

TEST(AdoptIncludes, GoBeforeLibtorchs) {
  const std::string torch = "#include <torch/torch.h>\n";
  EXPECT_EQ(whole("#include <vector>\n" + torch + kUse),
            "#include <vector>\n" + kNew + torch + kUsed);
  EXPECT_EQ(whole("#pragma once\n#ifdef A\n#include <torch/a.h>\n#endif\n" + torch + kUse),
            "#pragma once\n#ifdef A\n#include <torch/a.h>\n#endif\n" + kNew + torch + kUsed);
}

TEST(AdoptIncludes, GoBehindOthers) {
  EXPECT_EQ(whole("#pragma once\n\n#include <x>\n" + kUse),
            "#pragma once\n\n#include <x>\n" + kNew + kUsed);
  EXPECT_EQ(whole("#include \"x.h\"\n\n" + kUse), "#include \"x.h\"\n" + kNew + "\n" + kUsed);
  EXPECT_EQ(whole("// Text.\n#pragma once\n" + kUse), "// Text.\n#pragma once\n" + kNew + kUsed);
  EXPECT_EQ(whole("// Text.\n\n" + kUse), "// Text.\n\n" + kNew + kUsed);
  EXPECT_EQ(whole("\xef\xbb\xbf" + kUse), "\xef\xbb\xbf" + kNew + kUsed);
}

TEST(AdoptIncludes, KeepLineEnds) {
  EXPECT_EQ(whole("#include <torch/torch.h>\r\ntorch::nn::ReLU a;\r\n"),
            "#include <tessera/nn.h>\r\n#include <torch/torch.h>\r\ntessera::nn::ReLU a;\r\n");
}

TEST(AdoptIncludes, AreAddedOnceAndWhereNeeded) {
  for (const char* line : {"#include <tessera/nn.h>\n", "#include \"tessera/tessera.h\"\n"})
    EXPECT_EQ(whole(line + kUse), line + kUsed);
  EXPECT_EQ(whole("#include <torch/torch.h>\nint a;\n"), "#include <torch/torch.h>\nint a;\n");
  const auto files = adopt_files({{"net.h", kUse}, {"a.cpp", "#include \"net.h\"\n" + kUse}}).files;
  EXPECT_EQ(files.at("net.h"), kNew + kUsed);
  EXPECT_EQ(files.at("a.cpp"), "#include \"net.h\"\n" + kUsed);
}

TEST(AdoptIncludes, FilesThatIncludeEachOther) {
  const auto files =
      adopt_files({{"a.h", "#include \"b.h\"\n" + kUse}, {"b.h", "#include \"a.h\"\n" + kUse}})
          .files;
  const bool a_has_it = files.at("a.h").find(kNew) != std::string::npos;
  const bool b_has_it = files.at("b.h").find(kNew) != std::string::npos;
  EXPECT_NE(a_has_it, b_has_it);
}

TEST(AdoptFiles, KnowWhatTheirHeadersDeclare) {
  const auto files = adopt_files({{"include/net/common.h", "namespace nn = torch::nn;\n"},
                                  {"include/net/block.h",
                                   "#include <net/common.h>\nstruct BlockImpl : nn::Module {\n  "
                                   "int forward(int);\n};\nTORCH_MODULE(Block);\n"},
                                  {"src/a.cpp",
                                   "#include \"net/block.h\"\nnn::Linear a;\n"
                                   "auto b = std::make_shared<BlockImpl>();\n"}})
                         .files;
  EXPECT_EQ(files.at("include/net/common.h"), "namespace nn = torch::nn;\n");
  EXPECT_NE(files.at("include/net/block.h").find("TESSERA_MODULE(Block)"), std::string::npos);
  EXPECT_EQ(files.at("src/a.cpp"),
            "#include \"net/block.h\"\ntessera::nn::Linear a;\n"
            "auto b = std::make_shared<Block::Impl>();\n");
}

TEST(AdoptFiles, AlsoOfThoseThatWereNotNamed) {
  const Files files = {{"net.h",
                        "#pragma once\nnamespace nn = torch::nn;\nstruct BlockImpl {\n  int "
                        "forward(int);\n};\nTORCH_MODULE(Block);\n"},
                       {"a.cpp", "#include \"net.h\"\nnn::GRU a;\nb->at<BlockImpl>(0);\n"}};
  const auto adopted = adopt_files(files, {"a.cpp"});
  EXPECT_EQ(
      adopted.files.at("a.cpp"),
      "#include \"net.h\"\n#include <tessera/nn.h>\ntessera::nn::GRU a;\nb->at<BlockImpl>(0);\n");
  EXPECT_EQ(adopted.files.at("net.h"), files.at("net.h"));
  ASSERT_EQ(adopted.also.size(), 1U);
  EXPECT_TRUE(adopted.also[0].ends_with("net.h")) << adopted.also[0];
}
