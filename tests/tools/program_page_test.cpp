// `tessera inspect --program`: the command line, its errors, and the page, also in Chromium.

#include "support/temporary_folder.h"
#include "tools/launched_tool.h"
#include "tools/report_fixture.h"
#include "tools/shell_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <random>

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kProgram = R"(input %0: float32[32, 32] = argument "x"
input %1: float32[32] = parameter "head.bias"
%2: float32[32, 32] = aten::mm(%0, %0)  # head
%3: float32[32, 32] strides=[1, 32] = aten::t(%2)
%4: float64[32, 32] = tessera::fused(%2, %1) {
  input %0: float32[32, 32] = outside ""
  input %1: float32[32] = outside ""
  %2: float32[32, 32] = aten::add.Tensor(%0, %1)
  %3: float64[32, 32] = aten::_to_copy(%2, dtype=float64)
  return %3
}
%5: float32[] = aten::sum(%3)
%6: float32[] = _c10d_functional::all_reduce(%5, "sum", "0")
%7: float32[] = _c10d_functional::wait_tensor(%6)
%8: float32[32] = aten::mul.Scalar(%1, 0.5)
return %4
return %7
write %8 to %1
)";

class ProgramPage : public ::testing::Test {
 protected:
  fs::path at(const std::string& name) const { return folder_.path() / name; }

  static ToolResult inspect(std::vector<std::string> words) {
    words.insert(words.begin(), {"inspect", "--program"});
    return run_tool({.arguments = words});
  }

  nlohmann::json data_of(const std::string& text) const {
    write_text(at("program.txt"), text);
    const auto result = inspect({at("program.txt").string(), "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(result.out);
  }

  std::string error_of(const std::string& text) const {
    write_text(at("program.txt"), text);
    const auto result = inspect({at("program.txt").string(), "-o", at("page.html").string()});
    EXPECT_EQ(result.exit_code, 1) << result.out;
    EXPECT_FALSE(fs::exists(at("page.html")));
    return result.err;
  }

  const testing::TemporaryFolder folder_;
};

const nlohmann::json& named(const nlohmann::json& list, const std::string& name) {
  for (const auto& each : list) {
    if (each["name"] == name) return each;
  }
  throw std::out_of_range(name);
}

TEST_F(ProgramPage, TellsWhatLivesFromWhereToWhere) {
  const auto data = data_of(kProgram);
  const auto& buffers = data["buffers"];
  // The view keeps the product alive behind the kernel that reads it.
  EXPECT_EQ(named(buffers, "mm"), (nlohmann::json{{"name", "mm"},
                                                  {"type", "float32[32, 32]"},
                                                  {"kind", "temporary"},
                                                  {"is_input", false},
                                                  {"bytes", 4096},
                                                  {"first", 0},
                                                  {"last", 3}}));
  EXPECT_EQ(named(buffers, "to_copy")["kind"], "result");
  EXPECT_EQ(named(buffers, "to_copy")["bytes"], 8192);
  EXPECT_EQ(named(buffers, "to_copy")["last"], 7);
  EXPECT_EQ(named(buffers, "all_reduce")["kind"], "result") << "a wait is a view of it";
  EXPECT_EQ(named(buffers, "mul")["kind"], "written");
  EXPECT_EQ(named(buffers, "head.bias")["kind"], "parameter");
  EXPECT_EQ(data["input_bytes"], 4096 + 128);
  EXPECT_EQ(data["peak"], 3) << "mm, to_copy and sum";
  EXPECT_EQ(data["peak_bytes"], 4096 + 8192 + 4);
}

TEST_F(ProgramPage, ShowsKernelsWithTheirOperatorsAndSources) {
  const auto data = data_of(kProgram);
  ASSERT_EQ(data["kernels"].size(), 1);
  EXPECT_EQ(data["kernels"][0]["name"], "cpp_fused_add_to_copy_0");
  EXPECT_THAT(data["kernels"][0]["source"].get<std::string>(),
              AllOf(StartsWith("extern \"C\" void cpp_fused_add_to_copy_0("),
                    HasSubstr("aten.add.Tensor")));
  const auto& fused = data["instructions"][2];
  EXPECT_EQ(fused["kernel"], 0);
  EXPECT_EQ(fused["operators"].size(), 2);
  EXPECT_EQ(fused["moved"], 4096 + 128 + 8192);
  EXPECT_EQ(data["instructions"][1]["moved"], 0) << "a view";
  EXPECT_EQ(data["instructions"][0]["module"], "head");
  EXPECT_TRUE(data["instructions"][4]["sends"]);
}

TEST_F(ProgramPage, WritesOnePageThatNeedsNothingElse) {
  write_text(at("run/program.txt"), kProgram);
  const auto result = inspect({at("run").string(), "-o", at("page.html").string()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("7 instructions, 1 kernels, "));
  const auto page = read_text(at("page.html"));
  EXPECT_THAT(page, AllOf(StartsWith("<!doctype html>"), HasSubstr("default-src 'none'"),
                          HasSubstr("<title>run \xc2\xb7 Tessera</title>"), Not(HasSubstr("{{"))));
}

TEST_F(ProgramPage, TakesTheLastOfADumpFolder) {
  write_text(at("dump/00-captured.txt"), "input %0: float32[2] = argument \"x\"\nreturn %0\n");
  write_text(at("dump/9-a.txt"), "damaged");
  write_text(at("dump/10-reuse_memory.txt"), kProgram);
  write_text(at("dump/notes.txt"), "damaged");
  const auto result = inspect({at("dump").string(), "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["name"], "10-reuse_memory.txt");
}

TEST_F(ProgramPage, SaysWhatIsWrongWithAFile) {
  const std::string input = "input %0: float32[4] = argument \"x\"\n";
  EXPECT_THAT(error_of("nonsense\n"), AllOf(StartsWith("tessera inspect: "), HasSubstr("line 1")));
  EXPECT_THAT(error_of(""), HasSubstr("it holds no program"));
  EXPECT_THAT(error_of(input + "%1: float32[4] = aten::relu(%7)\nreturn %1\n"),
              HasSubstr("line 2"));
  EXPECT_THAT(error_of(input + "%1: float32[4] = aten::relu_(%0!)\nreturn %1\n"),
              HasSubstr("not well-formed"));
  // A body of which no kernel can be made.
  EXPECT_THAT(
      error_of(input + "%1: float32[4] = tessera::fused(%0) {\n  input %0: float32[4] = outside "
                       "\"\"\n  %1: float32[4] = aten::cumsum(%0, 0)\n  return %1\n}\nreturn %1\n"),
      HasSubstr("kernels can't be written"));
  const auto none = inspect({at("nowhere").string()});
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.err, HasSubstr("which does not exist"));
  fs::create_directory(at("empty"));
  EXPECT_THAT(inspect({at("empty").string()}).err, HasSubstr("found neither"));
  EXPECT_THAT(inspect({"/dev/zero"}).err, HasSubstr("expected a plain file"));
  EXPECT_EQ(inspect({at("empty").string(), "--verify"}).exit_code, 2);
}

TEST_F(ProgramPage, LeavesTheProgramItself) {
  write_text(at("program.txt"), kProgram);
  const auto file = at("program.txt").string();
  const auto result = inspect({file, "-o", file});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("expected a new file after -o"));
  EXPECT_EQ(read_text(at("program.txt")), kProgram);
}

TEST_F(ProgramPage, IsDrawnInABrowserWithHostileNamesAsText) {
  std::string text = kProgram;
  const std::string hostile = "</script><img src=x onerror=window.hacked=1>";
  text.replace(text.find("head.bias"), 9, hostile);
  write_text(at("program.txt"), text);
  const auto made = inspect({at("program.txt").string(), "-o", at("page.html").string()});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  std::string command = std::string("python3 ") + quoted(TESSERA_REPORT_IN_BROWSER) + " " +
                        quoted(at("page.html").string());
  if (const char* pictures = std::getenv("TESSERA_SCREENSHOTS"))
    command += " --screenshot " + quoted(std::string(pictures) + "/program.png");
  const auto output = run_shell(command);
  if (output.exit_code == kScriptSkips) GTEST_SKIP() << output.text;
  ASSERT_EQ(output.exit_code, 0) << output.text;
  const auto seen = nlohmann::json::parse(output.text);
  EXPECT_EQ(seen["errors"], nlohmann::json::array());
  EXPECT_EQ(seen["requests"], nlohmann::json::array());
  EXPECT_LE(seen["overflow"], 0);
  EXPECT_EQ(seen["hacked"], "undefined");
  EXPECT_EQ(seen["images"], 0);
  EXPECT_EQ(seen["sections"], nlohmann::json({"summary", "memory", "flow", "kernels"}));
  EXPECT_EQ(seen["buffers"], 5);
  EXPECT_EQ(seen["instructions"], 7);
  EXPECT_THAT(seen["summary"].get<std::string>(), HasSubstr("12.3 kB"));
  EXPECT_THAT(seen["spanTooltip"].get<std::string>(), HasSubstr("returned, made by instruction 2"));
  EXPECT_THAT(seen["openKernel"].get<std::string>(), HasSubstr("cpp_fused_add_to_copy_0("));
}

}  // namespace
}  // namespace tessera::test
