// The page of `tessera report` in headless Chromium. With TESSERA_SCREENSHOTS=FOLDER it leaves
// pictures there.

#include "support/temporary_folder.h"
#include "tools/launched_tool.h"
#include "tools/report_fixture.h"
#include "tools/shell_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;
using Strings = std::vector<std::string>;

class ReportInBrowser : public ::testing::Test {
 protected:
  fs::path at(const std::string& name) const { return folder_.path() / name; }

  void make_page(const std::vector<fs::path>& runs) const {
    Strings words = {"report", "--open", "no", "-o", at("page.html").string()};
    for (const auto& run : runs) words.push_back(run.string());
    const auto result = run_tool({.arguments = words});
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }

  /// What report_in_browser.py sees on the page; null, and the test skipped, without Chromium.
  nlohmann::json look(const std::string& picture, const std::string& options = "") {
    std::string command = std::string("python3 ") + quoted(TESSERA_REPORT_IN_BROWSER) + " " +
                          quoted(at("page.html").string()) + " " + options;
    if (const char* pictures = std::getenv("TESSERA_SCREENSHOTS"))
      command += " --screenshot " + quoted(std::string(pictures) + "/" + picture + ".png");
    const auto output = run_shell(command);
    if (output.exit_code == kScriptSkips) {
      skip_reason_ = output.text;
      return nullptr;
    }
    EXPECT_EQ(output.exit_code, 0) << output.text;
    const auto seen = nlohmann::json::parse(output.text, nullptr, false);
    EXPECT_TRUE(seen.is_object()) << output.text;
    EXPECT_EQ(seen["errors"], nlohmann::json::array());
    EXPECT_EQ(seen["requests"], nlohmann::json::array());
    EXPECT_LE(seen["overflow"], 0) << "wider than the window";
    return seen;
  }

  const testing::TemporaryFolder folder_;
  std::string skip_reason_;
};

TEST_F(ReportInBrowser, DrawsARunAndAnswersToTheMouse) {
  write_run(at("first"), {.is_compiled = true, .resumed_at = 230});
  make_page({at("first")});
  const auto seen = look("one_run");
  if (seen.is_null()) GTEST_SKIP() << skip_reason_;
  EXPECT_EQ(seen["heading"], "first");
  EXPECT_EQ(seen["charts"], nlohmann::json({"chart-loss", "chart-val_nats_per_byte",
                                            "chart-tokens_per_s", "chart-memory_bytes",
                                            "chart-comm_share", "chart-grad_norm", "chart-lr"}));
  EXPECT_EQ(seen["lossCurves"], nlohmann::json({400, 400, 8}));
  EXPECT_EQ(seen["marks"], nlohmann::json({"resumed"}));
  EXPECT_THAT(seen["lossTooltip"].get<std::string>(), HasSubstr("step "));
  EXPECT_THAT(seen["lossTooltip"].get<std::string>(), HasSubstr("training, smoothed"));
  EXPECT_EQ(seen["spans"], 43);
  EXPECT_EQ(seen["waits"], 3);
  EXPECT_EQ(seen["arrows"], 3);
  EXPECT_THAT(seen["waitTooltip"].get<std::string>(), HasSubstr("waits for rank 1"));
  EXPECT_THAT(seen["spanTooltip"].get<std::string>(), HasSubstr("backward\n108.3 ms"));
  EXPECT_THAT(seen["waitTable"].get<std::string>(), HasSubstr("rank 0rank 1"));
  EXPECT_THAT(seen["timeAxis"].get<std::string>(), HasSubstr("1 min"));
  EXPECT_THAT(seen["openProgram"].get<std::string>(), HasSubstr("void fused_0("));
  EXPECT_THAT(seen["sharding"].get<std::string>(), HasSubstr("embedding.weight"));
  EXPECT_EQ(seen["sections"], nlohmann::json({"summary", "curves", "sample", "timeline", "sharding",
                                              "configuration", "program"}));
}

TEST_F(ReportInBrowser, ComparesRunsInTheDarkAndOnAPhone) {
  write_run(at("a"), {});
  write_run(at("b"),
            {.steps = 320, .ranks = 4, .parallel = "fully_shard", .has_named_waits = false});
  make_page({at("a"), at("b")});
  struct {
    const char* picture;
    const char* options;
  } const cases[] = {{"two_runs", "--width 1600"},
                     {"two_runs_dark", "--dark"},
                     {"two_runs_narrow", "--width 400"}};
  for (const auto& [picture, options] : cases) {
    SCOPED_TRACE(picture);
    const auto seen = look(picture, options);
    if (seen.is_null()) GTEST_SKIP() << skip_reason_;
    EXPECT_EQ(seen["lossCurves"].size(), 6);
    EXPECT_EQ(seen["differences"], nlohmann::json({"ranks", "parallel", "steps"}));
    EXPECT_THAT(seen["summary"].get<std::string>(), HasSubstr("320"));
  }
}

TEST_F(ReportInBrowser, ShowsHostileNamesAsText) {
  const fs::path run = at("<img src=x onerror=window.hacked=1>");
  const std::string script = "</script><script>window.hacked=1</script>";
  write_run(run, {});
  write_text(run / "config.json",
             nlohmann::json{{script, "<img src=x onerror=window.hacked=1>"}}.dump());
  write_text(run / "run.json", nlohmann::json{{"command", script},
                                              {"sharding", {{{"name", script}, {"shape", {3, 4}}}}}}
                                   .dump());
  write_text(run / "program.cpp", script);
  make_page({run});
  const auto seen = look("hostile");
  if (seen.is_null()) GTEST_SKIP() << skip_reason_;
  EXPECT_EQ(seen["hacked"], "undefined");
  EXPECT_EQ(seen["images"], 0);
  EXPECT_EQ(seen["heading"], run.filename().string());
  EXPECT_THAT(seen["configuration"].get<std::string>(), HasSubstr(script));
  EXPECT_THAT(seen["sharding"].get<std::string>(), HasSubstr(script));
  EXPECT_EQ(seen["openProgram"], script);
}

TEST_F(ReportInBrowser, ShowsRunsOfNoStepOrOne) {
  write_text(at("none/metrics.jsonl"), "");
  make_page({at("none")});
  auto seen = look("no_step");
  if (seen.is_null()) GTEST_SKIP() << skip_reason_;
  EXPECT_EQ(seen["charts"].size(), 0);
  EXPECT_EQ(seen["notes"], "no step has been taken yet");
  write_text(at("one/metrics.jsonl"), "{\"step\":1,\"loss\":5.5,\"lr\":0}\n");
  make_page({at("one"), at("none")});
  seen = look("one_step");
  EXPECT_EQ(seen["charts"], nlohmann::json({"chart-loss", "chart-lr"}));
  EXPECT_EQ(seen["notes"], "none: no step has been taken yet");
}

}  // namespace
}  // namespace tessera::test
