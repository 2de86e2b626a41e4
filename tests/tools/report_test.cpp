// `tessera report`: the command line, its errors, and the page as text.

#include "support/temporary_folder.h"
#include "tools/launched_tool.h"
#include "tools/report_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class Report : public ::testing::Test {
 protected:
  fs::path at(const std::string& name) const { return folder_.path() / name; }

  ToolResult report(const std::vector<std::string>& arguments) const {
    std::vector<std::string> words = {"report"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return run_tool({.arguments = words});
  }

  std::string page_of(const std::vector<fs::path>& runs) const {
    std::vector<std::string> words = {"-o", at("page.html").string()};
    for (const auto& run : runs) words.push_back(run.string());
    const auto result = report(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return read_text(at("page.html"));
  }

  /// The data that the page's scripts read.
  static nlohmann::json data_of(const std::string& page) {
    const std::string begin = "<script id=\"data\" type=\"application/json\">";
    const auto from = page.find(begin) + begin.size();
    return nlohmann::json::parse(page.substr(from, page.find("</script>", from) - from));
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(Report, WritesOnePageThatNeedsNothingElse) {
  write_run(at("run"), {.is_compiled = true});
  const auto result = report({at("run").string(), "-o", at("page.html").string(), "--open", "no"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("page.html: 1 run, "));
  const std::string page = read_text(at("page.html"));
  EXPECT_THAT(page, StartsWith("<!doctype html>"));
  EXPECT_THAT(page, HasSubstr("<title>run \xc2\xb7 Tessera</title>"));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  EXPECT_THAT(page, Not(HasSubstr("src=\"")));
  EXPECT_THAT(page, Not(HasSubstr("@import")));
  EXPECT_THAT(page, Not(HasSubstr("{{")));
  for (std::size_t at = page.find("http"); at != std::string::npos;
       at = page.find("http", at + 1)) {
    const std::string address = page.substr(at, 30);
    EXPECT_TRUE(address.starts_with("http-equiv") ||
                address.starts_with("http://www.w3.org/2000/svg"))
        << address;
  }
}

TEST_F(Report, HoldsCurvesConfigurationShardingTimelineAndProgram) {
  write_run(at("run"), {.is_compiled = true});
  const auto run = data_of(page_of({at("run")}))["runs"][0];
  EXPECT_EQ(run["curves"]["loss"]["value"].size(), 400);
  EXPECT_EQ(run["curves"]["smoothed_loss"]["step"].size(), 400);
  EXPECT_EQ(run["curves"]["val_loss"]["step"].size(), 8);
  for (const char* name : {"tokens_per_s", "memory_bytes", "comm_share", "lr", "grad_norm"})
    EXPECT_TRUE(run["curves"].contains(name)) << name;
  EXPECT_EQ(run["config"][0][0], "data");  // in the file's order
  EXPECT_EQ(run["config"][1], nlohmann::json({"ranks", "2"}));
  EXPECT_EQ(run["mesh"][0]["name"], "dp");
  EXPECT_EQ(run["sharding"].size(), 26);
  EXPECT_EQ(run["sharding"][0]["placements"], "Replicate()");
  EXPECT_EQ(run["timeline"]["shares"].size(), 2);
  EXPECT_EQ(run["timeline"]["waits"][0]["peer"], 1);
  EXPECT_THAT(run["program"].get<std::string>(), HasSubstr("fused_0"));
  EXPECT_EQ(run["marks"][0]["kind"], "saved");
  EXPECT_EQ(run["summary"]["steps"], 400);
  EXPECT_EQ(run["curves"]["val_nats_per_byte"]["step"].size(), 8);
  EXPECT_NEAR(run["summary"]["nats_per_byte"].get<double>(),
              run["summary"]["best_val_loss"].get<double>() / 2, 1e-5);
  EXPECT_EQ(run["summary"]["nats_per_byte_step"], run["summary"]["best_val_step"]);
}

TEST_F(Report, HoldsKernelsOfAGpuBesideTheSpansOfItsHost) {
  const auto event = [](const char* name, const char* kind, int thread, double begin, double end) {
    return nlohmann::json{{"name", name},  {"cat", kind}, {"ph", "X"},         {"pid", 0},
                          {"tid", thread}, {"ts", begin}, {"dur", end - begin}};
  };
  const auto trace =
      nlohmann::json::array({event("forward", "forward", 0, 100, 160),
                             event("gemm", "kernel", 1, 120, 250),
                             event("memcpy", "kernel", 2, 90, 110),
                             {{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", 1}}});
  write_text(at("run/timeline.json"), nlohmann::json{{"traceEvents", trace}}.dump());
  write_text(at("run/metrics.jsonl"),
             "{\"step\":1,\"loss\":5,\"seconds\":1,\"mfu\":0.42,\"host_lead_seconds\":0.03}\n");
  const auto run = data_of(page_of({at("run")}))["runs"][0];
  EXPECT_EQ(run["summary"]["mfu"], 0.42);
  EXPECT_EQ(run["curves"]["mfu"]["value"], nlohmann::json({0.42}));
  const auto& timeline = run["timeline"];
  const auto& spans = timeline["spans"];
  EXPECT_EQ(spans["thread"], nlohmann::json({0, 1, 2}));
  EXPECT_EQ(spans["start"], nlohmann::json({10, 30, 0}));
  EXPECT_EQ(spans["duration"], nlohmann::json({60, 130, 20}));
  std::vector<std::string> kinds;
  for (const auto& kind : spans["category"]) kinds.push_back(timeline["texts"][kind.get<size_t>()]);
  EXPECT_EQ(kinds, (std::vector<std::string>{"forward", "kernel", "kernel"}));
  EXPECT_EQ(timeline["shares"][0]["kernel"], 0) << "shares are of the host's time";
}

TEST_F(Report, ComparesSeveralRuns) {
  write_run(at("a"), {});
  write_run(at("b"), {.ranks = 4, .parallel = "fully_shard", .resumed_at = 100});
  const auto data = data_of(page_of({at("a"), at("b")}));
  ASSERT_EQ(data["runs"].size(), 2);
  EXPECT_EQ(data["runs"][0]["name"], "a");
  EXPECT_EQ(data["runs"][1]["sharding"][0]["local_shape"], "[64,256]");
  EXPECT_EQ(data["runs"][1]["curves"]["loss"]["step"].size(), 400);
}

TEST_F(Report, CutsLongCurvesDown) {
  std::string lines;
  for (int step = 1; step <= 20'000; ++step)
    lines += "{\"step\":" + std::to_string(step) + ",\"loss\":" + std::to_string(step % 97) + "}\n";
  write_text(at("run/metrics.jsonl"), lines);
  const auto curves = data_of(page_of({at("run")}))["runs"][0]["curves"];
  for (const char* name : {"loss", "smoothed_loss"}) {
    EXPECT_LE(curves[name]["step"].size(), 2000);
    EXPECT_EQ(curves[name]["step"].front(), 1);
    EXPECT_EQ(curves[name]["step"].back(), 20'000);
  }
}

TEST_F(Report, CannotBeBrokenByNames) {
  const std::string hostile = "</script><script>window.hacked=1</script><!--\xff\x01\"'&";
  const fs::path run = at("<img src=x onerror=alert(1)>&amp;\"'");
  write_run(run, {});
  const auto config = nlohmann::json{{"<b>", "</script><!-- {{script}} {{data}}"}};
  write_text(run / "config.json", config.dump());
  write_text(run / "program.cpp", hostile);
  const std::string page = page_of({run});
  EXPECT_THAT(page, HasSubstr("<title>&lt;img src=x onerror=alert(1)&gt;&amp;amp;&quot;' "));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(page, Not(HasSubstr("<b>")));
  EXPECT_THAT(page, Not(HasSubstr("<!--")));
  const auto data = data_of(page)["runs"][0];  // whole: nothing ended its element early
  EXPECT_EQ(data["name"], run.filename().string());
  EXPECT_EQ(data["config"][0][1], "</script><!-- {{script}} {{data}}");
  EXPECT_THAT(data["program"].get<std::string>(), StartsWith("</script><script>window.hacked=1"));
}

TEST_F(Report, ShowsARunThatHasTakenNoStep) {
  write_run(at("run"), {.has_timeline = false});
  write_text(at("run/metrics.jsonl"), "");
  const auto result = report({at("run").string(), "-o", at("page.html").string()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "tessera report: run: no step has been taken yet\n");
  const auto data = data_of(read_text(at("page.html")))["runs"][0];
  EXPECT_EQ(data["notes"][0], "no step has been taken yet");
  EXPECT_EQ(data["summary"]["steps"], 0);
}

TEST_F(Report, CountsBrokenLinesOnThePage) {
  write_run(at("run"), {});
  write_text(at("run/metrics.jsonl"),
             read_text(at("run/metrics.jsonl")) + "junk\n{\"step\":401,\"lo");
  const auto data = data_of(page_of({at("run")}))["runs"][0];
  ASSERT_EQ(data["notes"].size(), 1);
  EXPECT_EQ(data["notes"][0], "1 line of 413 in metrics.jsonl could not be read and was skipped");
}

TEST_F(Report, TellsWhatIsWrongWithAFolder) {
  write_text(at("empty/other.txt"), "");
  write_text(at("junk/metrics.jsonl"), "a\nb\nc\n");
  write_run(at("run"), {});
  const auto error_of = [&](const std::vector<std::string>& words) {
    const auto result = report(words);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  const std::string folder = folder_.path().string();
  EXPECT_EQ(error_of({at("none")}), "tessera report: expected a run folder, got " + folder +
                                        "/none, which does not exist; `tessera train` makes them "
                                        "under runs/\n");
  EXPECT_EQ(error_of({at("empty")}),
            "tessera report: expected a run folder with a file metrics.jsonl, got " + folder +
                "/empty without one; give the folder that `tessera train --run` names\n");
  EXPECT_EQ(error_of({at("run/metrics.jsonl")}),
            "tessera report: expected a run folder, got the file " + folder +
                "/run/metrics.jsonl; give the folder it lies in\n");
  EXPECT_EQ(error_of({at("junk")}),
            "tessera report: expected lines like {\"step\": 1, \"loss\": 5.5} in " + folder +
                "/junk/metrics.jsonl, got 3 lines and none of that kind\n");
  EXPECT_EQ(error_of({at("run"), at("run/../run")}),
            "tessera report: expected different run folders, got " + folder +
                "/run/../run twice; leave one out\n");
  EXPECT_FALSE(fs::exists("report.html"));
}

TEST_F(Report, LeavesOutWhatIsNoRunBesideRuns) {
  write_run(at("runs/a"), {});
  write_run(at("runs/b"), {});
  write_text(at("runs/started/config.json"), "{}");
  write_text(at("runs/report.html"), "");
  const auto result = report({at("runs/a"), at("runs/b"), at("runs/report.html"),
                              at("runs/started"), "-o", at("page.html"), "--open", "no"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string folder = at("runs").string();
  EXPECT_EQ(result.err, "tessera report: left out: expected a run folder, got the file " + folder +
                            "/report.html; give the folder it lies in\n"
                            "tessera report: left out: expected a run folder with a file "
                            "metrics.jsonl, got " +
                            folder +
                            "/started without one; give the folder that `tessera train --run` "
                            "names\n");
  EXPECT_THAT(result.out, HasSubstr("page.html: 2 runs, "));
  EXPECT_EQ(report({at("runs/a"), at("none")}).exit_code, 1);
  EXPECT_EQ(report({at("runs/started"), at("runs/report.html")}).exit_code, 1);
}

TEST_F(Report, DoesNotWaitForAPipe) {
  write_run(at("run"), {});
  for (const char* name : {"timeline.json", "config.json"}) {
    fs::remove(at("run") / name);
    ASSERT_EQ(mkfifo((at("run") / name).c_str(), 0600), 0);
  }
  const auto data = data_of(page_of({at("run")}))["runs"][0];
  EXPECT_EQ(data["notes"].size(), 2);
}

TEST_F(Report, OverwritesNoFileOfTheRunAndKeepsTheOldPageWhenItFails) {
  write_run(at("run"), {});
  const std::string metrics = read_text(at("run/metrics.jsonl"));
  const auto result = report({at("run"), "-o", at("run/metrics.jsonl")});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("metrics.jsonl, which is part of the run itself\n"));
  EXPECT_EQ(read_text(at("run/metrics.jsonl")), metrics);
  EXPECT_THAT(report({at("run"), "-o", at("run")}).err,
              HasSubstr("expected a file after -o, got the folder "));
  const auto unwritable = report({at("run"), "-o", at("no/such/page.html")});
  EXPECT_EQ(unwritable.exit_code, 1);
  EXPECT_THAT(unwritable.err, HasSubstr("check that its folder exists"));
  EXPECT_EQ(report({at("run"), "-o", "/dev/full"}).exit_code, 1);
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

TEST_F(Report, FollowsItsUsersLinksAlone) {
  write_run(at("run"), {});
  std::ofstream(at("target")) << "precious";
  fs::create_symlink(at("target"), at("link.html"));
  EXPECT_EQ(report({at("run"), "-o", at("link.html")}).exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(at("link.html")));
  EXPECT_THAT(read_text(at("target")), StartsWith("<!doctype html>"));
  if (geteuid() != 0) return;
  // Planted by somebody else, in a folder that many write to.
  std::ofstream(at("target")) << "precious";
  ASSERT_EQ(lchown(at("link.html").c_str(), 12345, 12345), 0);
  EXPECT_EQ(report({at("run"), "-o", at("link.html")}).exit_code, 0);
  EXPECT_EQ(read_text(at("target")), "precious");
  EXPECT_THAT(read_text(at("link.html")), StartsWith("<!doctype html>"));
}

TEST_F(Report, PrintsNamesSoThatATerminalOnlyShowsThem) {
  const std::string name = "run\x1b]0;title\x07";
  write_run(at(name), {});
  std::ofstream(at(name) / "run.json") << "broken";
  fs::create_directory(at("no\x1b"));
  const auto result = report({at(name), at("no\x1b"), "-o", at("page.html")});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("run\\x1b]0;title\\x07: run.json was passed over"));
  EXPECT_THAT(result.err, HasSubstr("no\\x1b without one"));
  EXPECT_THAT(result.err, Not(HasSubstr("\x1b")));
}

TEST_F(Report, RefusesWrongWordsWithTheRightOne) {
  EXPECT_EQ(report({"--opne", "no"}).exit_code, 2);
  EXPECT_THAT(report({"--opne", "no"}).err, HasSubstr("did you mean --open?"));
  EXPECT_EQ(report({}).exit_code, 2);
  EXPECT_THAT(report({}).err, HasSubstr("RUN is required"));
  EXPECT_THAT(report({"x", "--open", "maybe"}).err, HasSubstr("--open"));
}

}  // namespace
}  // namespace tessera::test
