#include <tessera/comm.h>
#include <tessera/trace.h>

#include "support/ranks.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <thread>

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;

std::vector<SpanRecord> of_kind(const std::vector<SpanRecord>& spans, SpanKind kind) {
  std::vector<SpanRecord> chosen;
  std::ranges::copy_if(spans, std::back_inserter(chosen),
                       [&](const SpanRecord& span) { return span.kind == kind; });
  return chosen;
}

TEST(Spans, ComeInTheOrderOfTheirEnds) {
  SpanRecorder recorder;
  {
    const Span outer(SpanKind::Forward, "outer");
    const Span inner(SpanKind::Data, "inner", 7);
  }
  const auto spans = recorder.take();
  ASSERT_EQ(spans.size(), 2);
  EXPECT_STREQ(spans[0].name, "inner");
  EXPECT_EQ(spans[0].detail, 7);
  EXPECT_STREQ(spans[1].name, "outer");
  EXPECT_LE(spans[1].begin, spans[0].begin);
  EXPECT_GE(spans[1].end, spans[0].end);
  EXPECT_TRUE(recorder.take().empty());
}

TEST(Spans, CommunicationInsideOfCommunicationCountsOnce) {
  const auto before = communication_seconds();
  const auto begun = std::chrono::steady_clock::now();
  {
    const Span outer(SpanKind::Communication, "all_reduce");
    const Span inner(SpanKind::Wait, "wait", 1);
    std::this_thread::sleep_for(20ms);
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begun;
  EXPECT_GE(communication_seconds() - before, 0.02);
  EXPECT_LE(communication_seconds() - before, passed.count());
}

TEST(Spans, OthersCostNoCommunication) {
  const auto before = communication_seconds();
  {
    const Span span(SpanKind::Forward, "forward");
  }
  EXPECT_EQ(communication_seconds(), before);
}

TEST(Spans, OneRecorderPerThread) {
  const SpanRecorder recorder;
  EXPECT_THROW(SpanRecorder(), c10::Error);
  std::thread([] { const SpanRecorder another; }).join();
}

TEST(SpansOnProcesses, TellWhomARankWaitedFor) {
  run_processes(2, [] {
    barrier();
    SpanRecorder recorder;
    if (rank() == 1) std::this_thread::sleep_for(100ms);
    all_reduce(torch::ones({1024}));
    const auto spans = recorder.take();
    const auto collectives = of_kind(spans, SpanKind::Communication);
    ASSERT_FALSE(collectives.empty());
    EXPECT_STREQ(collectives.back().name, "all_reduce");
    EXPECT_EQ(collectives.back().detail, 4096);
    if (rank() == 1) return;
    const auto waits = of_kind(spans, SpanKind::Wait);
    const auto longest = std::ranges::max_element(
        waits, {}, [](const SpanRecord& span) { return span.end - span.begin; });
    ASSERT_NE(longest, waits.end());
    EXPECT_EQ(longest->detail, 1);
    EXPECT_GT(longest->end - longest->begin, 20'000'000);
  });
}

}  // namespace
}  // namespace tessera::testing
