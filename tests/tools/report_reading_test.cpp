// What `tessera report` makes of the files of a run: curves, marks, timelines, waits.

#include "report/files.h"
#include "report/metrics.h"
#include "report/run_folder.h"
#include "report/timeline.h"
#include "support/random.h"
#include "support/temporary_folder.h"
#include "tools/report_fixture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace tessera::test {
namespace {

using report::Metrics;
using report::Point;
using report::Series;
using report::Timeline;

Metrics metrics_from(const std::string& lines) {
  const testing::TemporaryFolder folder;
  write_text(folder.path() / "metrics.jsonl", lines);
  return report::read_metrics(folder.path() / "metrics.jsonl");
}

std::vector<std::int64_t> steps_of(const Series& series) {
  std::vector<std::int64_t> steps;
  for (const auto& point : series) steps.push_back(point.step);
  return steps;
}

using Steps = std::vector<std::int64_t>;

Series noisy_series(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> noise;
  Series series;
  for (std::size_t at = 0; at < size; ++at)
    series.push_back(
        {static_cast<std::int64_t>(at + 1), 0.1 * static_cast<double>(at), noise(random)});
  return series;
}

TEST(ReportCurves, KeepShortSeriesAsTheyAre) {
  const Series series = noisy_series(2000, 1);
  EXPECT_EQ(steps_of(report::downsample(series, 2000)), steps_of(series));
  EXPECT_TRUE(report::downsample({}, 2000).empty());
}

TEST(ReportCurves, KeepEndsAndEverySpikeOfLongSeries) {
  const auto seed = testing::test_seed();
  SCOPED_TRACE("TESSERA_TEST_SEED=" + std::to_string(seed));
  Series series = noisy_series(100'003, seed);
  series[54'321].value = 1e3;
  series[54'322].value = -1e3;
  const Series drawn = report::downsample(series, 2000);
  EXPECT_LE(drawn.size(), 2000);
  EXPECT_GT(drawn.size(), 1900);
  EXPECT_EQ(drawn.front().step, 1);
  EXPECT_EQ(drawn.back().step, 100'003);
  EXPECT_TRUE(std::ranges::is_sorted(drawn, {}, &Point::step));
  EXPECT_EQ(std::ranges::max(drawn, {}, &Point::value).step, 54'322);
  EXPECT_EQ(std::ranges::min(drawn, {}, &Point::value).step, 54'323);
}

TEST(ReportCurves, SmoothWithoutLagOrBias) {
  Series line;
  for (int step = 0; step < 200; ++step) line.push_back({step, 0, 3.0 - 0.01 * step});
  const Series smoothed = report::smooth(line, 5);
  EXPECT_NEAR(smoothed[100].value, line[100].value, 1e-9);
  const Series constant = report::smooth(Series(50, Point{1, 0, 2.5}), 10);
  for (const auto& point : constant) EXPECT_NEAR(point.value, 2.5, 1e-12);
  EXPECT_EQ(report::smooth({{1, 0, 4.0}}, 10)[0].value, 4.0);
  EXPECT_EQ(report::smooth(line, 1)[7].value, line[7].value);
}

TEST(ReportMetrics, SeparateTrainingFromValidation) {
  const auto metrics = metrics_from(
      "{\"step\":1,\"loss\":5.5,\"lr\":0.1,\"seconds\":0.5}\n"
      "{\"step\":1,\"val_loss\":5.6,\"seconds\":0.6}\n"
      "{\"step\":2,\"loss\":5.0,\"lr\":0.1,\"seconds\":1.0}\n");
  EXPECT_EQ(steps_of(metrics.of("loss")), (Steps{1, 2}));
  EXPECT_EQ(steps_of(metrics.of("val_loss")), (Steps{1}));
  EXPECT_EQ(metrics.last_step, 2);
  EXPECT_EQ(metrics.seconds, 1.0);
  EXPECT_TRUE(metrics.of("grad_norm").empty());
}

TEST(ReportMetrics, CountTheLaterLineOfAStepAndNothingOfAnAbandonedEnd) {
  const auto metrics = metrics_from(
      "{\"step\":1,\"loss\":1,\"seconds\":10}\n{\"step\":2,\"loss\":2,\"seconds\":20}\n"
      "{\"step\":3,\"loss\":3,\"seconds\":30}\n{\"step\":3,\"val_loss\":9,\"seconds\":31}\n"
      "{\"event\":\"resumed\",\"step\":1}\n{\"step\":2,\"loss\":20,\"seconds\":1}\n");
  const Series& loss = metrics.of("loss");
  ASSERT_EQ(steps_of(loss), (Steps{1, 2}));
  EXPECT_EQ(loss[1].value, 20);
  EXPECT_EQ(loss[1].seconds, 10);  // its clock began anew, at what is kept
  EXPECT_TRUE(metrics.of("val_loss").empty());
  ASSERT_EQ(metrics.marks.size(), 1);
  EXPECT_EQ(metrics.marks[0].kind, "resumed");
}

TEST(ReportMetrics, TakeRepeatedStepsWithoutAMarkToo) {
  const auto metrics =
      metrics_from("{\"step\":5,\"loss\":1}\n{\"step\":6,\"loss\":2}\n{\"step\":5,\"loss\":3}\n");
  ASSERT_EQ(steps_of(metrics.of("loss")), (Steps{5}));
  EXPECT_EQ(metrics.of("loss")[0].value, 3);
}

TEST(ReportMetrics, SkipAndCountBrokenLinesButNotAnUnfinishedLast) {
  const auto metrics = metrics_from(
      "{\"step\":1,\"loss\":5}\nnot json\n[1,2]\n{\"loss\":4}\n{\"step\":\"2\",\"loss\":4}\n"
      "{\"step\":-2,\"loss\":4}\n{\"step\":1e30,\"loss\":4}\n{\"step\":2,\"loss\":1e999}\n\n"
      "{\"step\":3,\"loss\":NaN}\n{\"step\":4}\n{\"step\":2,\"loss\":4}\n{\"step\":3,\"los");
  EXPECT_EQ(metrics.broken_lines, 9);
  EXPECT_EQ(metrics.lines, 11);
  EXPECT_EQ(steps_of(metrics.of("loss")), (Steps{1, 2}));
}

TEST(ReportMetrics, LeaveAGapWhereALossIsNotFinite) {
  const auto metrics = metrics_from(
      "{\"step\":1,\"loss\":5}\n{\"step\":2,\"loss\":null}\n"
      "{\"event\":\"nonfinite\",\"step\":2,\"module\":\"blocks.3\",\"text\":\"skipped\"}\n"
      "{\"step\":3,\"loss\":4}\n");
  EXPECT_EQ(metrics.broken_lines, 0);
  EXPECT_EQ(steps_of(metrics.of("loss")), (Steps{1, 3}));
  ASSERT_EQ(metrics.marks.size(), 1);
  EXPECT_EQ(metrics.marks[0].detail, "module blocks.3, skipped");
}

TEST(ReportMetrics, SurviveDeepNesting) {
  const std::string deep(200'000, '[');
  const auto metrics =
      metrics_from("{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":" + deep + "\n" +
                   "{\"step\":2,\"loss\":1,\"x\":" + deep + std::string(200'000, ']') + "}\n");
  EXPECT_EQ(metrics.broken_lines, 2);
}

Timeline timeline_from(const std::string& events) {
  return report::read_timeline("{\"traceEvents\":[" + events + "]}");
}

std::string event(int rank, const char* name, const char* category, double start, double duration,
                  const char* arguments = "{}") {
  return std::string("{\"ph\":\"X\",\"tid\":0,\"name\":\"") + name + "\",\"cat\":\"" + category +
         "\",\"pid\":" + std::to_string(rank) + ",\"ts\":" + std::to_string(start) +
         ",\"dur\":" + std::to_string(duration) + ",\"args\":" + arguments + "}";
}

TEST(ReportTimeline, NestsSpansAndCountsTimeOnce) {
  const auto timeline = timeline_from(
      event(0, "step", "other", 1000, 100) + "," + event(0, "forward", "forward", 1000, 60) + "," +
      event(0, "mm", "operator", 1010, 20) + "," + event(0, "backward", "backward", 1060, 40) +
      ",{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0},{\"ph\":\"X\",\"ts\":\"soon\"},7");
  ASSERT_EQ(timeline.spans.size(), 4);
  EXPECT_EQ(timeline.duration, 100);
  EXPECT_EQ(timeline.spans[0].depth, 0);
  EXPECT_EQ(timeline.spans[2].name, "mm");
  EXPECT_EQ(timeline.spans[2].depth, 2);
  EXPECT_EQ(timeline.spans[2].category, "forward");
  EXPECT_EQ(timeline.spans[3].depth, 1);
  const auto& shares = timeline.shares.at(0);
  EXPECT_EQ(shares.at("forward"), 60);
  EXPECT_EQ(shares.at("backward"), 40);
  EXPECT_EQ(shares.at("other"), 0);
}

TEST(ReportTimeline, KeepsKernelsBesideTheSpansOfTheHost) {
  auto kernel = event(0, "gemm", "kernel", 1030, 90);
  kernel.replace(kernel.find("\"tid\":0"), 7, "\"tid\":1");
  const auto timeline = timeline_from(event(0, "forward", "forward", 1000, 60) + "," + kernel);
  ASSERT_EQ(timeline.spans.size(), 2);
  EXPECT_EQ(timeline.spans[1].category, "kernel");
  EXPECT_EQ(timeline.spans[1].thread, 1);
  EXPECT_EQ(timeline.spans[1].depth, 0);
  EXPECT_EQ(timeline.duration, 120);
  EXPECT_EQ(timeline.shares.at(0).at("forward"), 60);
  EXPECT_FALSE(timeline.shares.at(0).contains("kernel")) << "shares are of the host's time";
}

TEST(ReportMetrics, KnowUtilizationAndTheLeadOfTheHost) {
  const auto metrics = metrics_from(
      "{\"step\":1,\"loss\":5.5,\"mfu\":0.4,\"host_lead_seconds\":0.03,\"seconds\":0.5}\n");
  EXPECT_EQ(metrics.of("mfu").at(0).value, 0.4);
  EXPECT_EQ(metrics.of("host_lead_seconds").at(0).value, 0.03);
}

TEST(ReportTimeline, TellsWhomAWaitWasFor) {
  const auto timeline = timeline_from(event(0, "all_reduce", "communication", 0, 50) + "," +
                                      event(0, "wait for rank 1", "wait", 0, 40, "{\"peer\":1}") +
                                      "," + event(1, "barrier", "wait", 0, 9, "{\"peers\":[2,3]}") +
                                      "," + event(2, "wait", "wait", 3, 1));
  ASSERT_EQ(timeline.waits.size(), 4);
  EXPECT_EQ(timeline.waits[0].peer, 1);
  EXPECT_EQ(timeline.waits[0].duration, 40);
  EXPECT_EQ(timeline.waits[0].name, "all_reduce");  // more than "wait for rank 1" says
  EXPECT_EQ(timeline.waits[1].peer, 2);
  EXPECT_EQ(timeline.waits[2].peer, 3);
  EXPECT_EQ(timeline.waits[3].peer, -1);
  EXPECT_EQ(timeline.shares.at(0).at("communication"), 10);
}

TEST(ReportTimeline, FindsWaitsFromWhenTheRanksCame) {
  const auto timeline = timeline_from(event(0, "all_reduce", "communication", 0, 50) + "," +
                                      event(1, "all_reduce", "communication", 40, 10) + "," +
                                      event(0, "all_reduce", "communication", 60, 10) + "," +
                                      event(1, "all_reduce", "communication", 55, 15) + "," +
                                      event(0, "send", "communication", 80, 5) + "," +
                                      event(1, "send", "communication", 95, 5));
  ASSERT_EQ(timeline.waits.size(), 2) << "a span that ended before the last one came did not wait";
  EXPECT_EQ(timeline.waits[0].rank, 0);
  EXPECT_EQ(timeline.waits[0].peer, 1);
  EXPECT_EQ(timeline.waits[0].duration, 40);
  EXPECT_TRUE(timeline.waits[0].is_inferred);
  EXPECT_EQ(timeline.waits[1].rank, 1);
  EXPECT_EQ(timeline.waits[1].duration, 5);
  EXPECT_EQ(timeline.shares.at(0).at("wait"), 40);
  EXPECT_EQ(timeline.shares.at(0).at("communication"), 25);
}

TEST(ReportTimeline, MatchesCollectivesBySequenceNumber) {
  const auto timeline =
      timeline_from(event(0, "all_reduce", "communication", 0, 9, "{\"sequence\":7}") + "," +
                    event(0, "all_reduce", "communication", 100, 50, "{\"sequence\":8}") + "," +
                    event(1, "all_reduce", "communication", 130, 20, "{\"sequence\":8}"));
  ASSERT_EQ(timeline.waits.size(), 1);
  EXPECT_EQ(timeline.waits[0].start, 100);
  EXPECT_EQ(timeline.waits[0].duration, 30);
}

TEST(ReportTimeline, InfersNothingWhereRanksTellOfWaits) {
  // Two groups, ranks 0 and 1, and 2 and 3; the ranks that came last have waited for nobody.
  const auto timeline = timeline_from(event(0, "all_reduce", "communication", 0, 50) + "," +
                                      event(0, "wait for rank 1", "wait", 0, 40, "{\"peer\":1}") +
                                      "," + event(1, "all_reduce", "communication", 40, 10) + "," +
                                      event(2, "all_reduce", "communication", 10, 60) + "," +
                                      event(2, "wait for rank 3", "wait", 10, 50, "{\"peer\":3}") +
                                      "," + event(3, "all_reduce", "communication", 60, 10));
  ASSERT_EQ(timeline.waits.size(), 2);
  EXPECT_EQ(timeline.waits[0].peer, 1);
  EXPECT_EQ(timeline.waits[1].peer, 3);
}

TEST(ReportTimeline, LeavesOutTheShortestOfTooManySpans) {
  std::string events;
  for (int at = 0; at < 25'000; ++at)
    events += event(at % 2, "s", "forward", 10.0 * at, 1 + at % 7) + (at == 24'999 ? "" : ",");
  const auto timeline = timeline_from(events);
  EXPECT_LE(timeline.spans.size(), 20'000);
  EXPECT_EQ(timeline.spans.size() + timeline.left_out, 25'000);
  EXPECT_EQ(std::ranges::max(timeline.spans, {}, &report::Span::duration).duration, 7);
}

TEST(ReportTimeline, RefusesWhatIsNoTrace) {
  EXPECT_THROW(report::read_timeline("{}"), std::exception);
  EXPECT_THROW(report::read_timeline("3"), std::exception);
  EXPECT_THROW(report::read_timeline("{\"traceEvents\":["), std::exception);
  EXPECT_TRUE(report::read_timeline("[]").spans.empty());
}

TEST(ReportRuns, AreNamedByAsMuchOfTheirPathAsTellsThemApart) {
  const testing::TemporaryFolder folder;
  const auto a = folder.path() / "a" / "run";
  const auto b = folder.path() / "b" / "run";
  for (const auto& run : {a, b}) write_text(run / "metrics.jsonl", "{\"step\":1,\"loss\":1}\n");
  const auto runs = report::read_runs({a, b}).read;
  EXPECT_EQ(runs[0].name, "a/run");
  EXPECT_EQ(runs[1].name, "b/run");
  EXPECT_EQ(report::read_runs({a / "."}).read[0].name, "run");
}

TEST(ReportRuns, NoteWhatIsWrongWithTheFilesBesideTheMetrics) {
  const testing::TemporaryFolder folder;
  write_text(folder.path() / "metrics.jsonl", "{\"step\":1,\"loss\":1}\noops\n");
  write_text(folder.path() / "config.json", "{\"a\":");
  write_text(folder.path() / "run.json", "[]");
  write_text(folder.path() / "timeline.json", "{}");
  const auto runs = report::read_runs({folder.path()}).read;
  ASSERT_EQ(runs[0].notes.size(), 4);
  EXPECT_TRUE(runs[0].notes[0].starts_with("config.json was passed over: ")) << runs[0].notes[0];
  EXPECT_EQ(runs[0].notes[1], "run.json was passed over: expected an object");
  EXPECT_EQ(runs[0].notes[2], "timeline.json was passed over: expected a list traceEvents");
  EXPECT_EQ(runs[0].notes[3], "1 line of 2 in metrics.jsonl could not be read and was skipped");
}

}  // namespace
}  // namespace tessera::test
