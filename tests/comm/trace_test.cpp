#include <tessera/comm.h>
#include <tessera/mesh.h>
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

SpanRecord longest_wait(const std::vector<SpanRecord>& spans) {
  const auto waits = of_kind(spans, SpanKind::Wait);
  if (waits.empty()) return {SpanKind::Wait, "none", -1, 0, 0};
  return *std::ranges::max_element(waits, {},
                                   [](const SpanRecord& span) { return span.end - span.begin; });
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
    const auto longest = longest_wait(spans);
    EXPECT_EQ(longest.detail, 1);
    EXPECT_GT(longest.end - longest.begin, 20'000'000);
  });
}

TEST(SpansOnProcesses, NameRanksOfTheWorldInGroupsOfAMesh) {
  run_processes(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    for (const char* mesh_dim : {"dp", "tp"}) {
      const auto group = mesh.group(mesh_dim);
      all_reduce(torch::ones({4}), ReduceOp::SUM, group);
      barrier();
      SpanRecorder recorder;
      if (rank() == 3) std::this_thread::sleep_for(100ms);
      all_reduce(torch::ones({1024}), ReduceOp::SUM, group);
      const auto spans = recorder.take();
      const int peer_of_3 = std::string(mesh_dim) == "dp" ? 1 : 2;
      if (rank() == peer_of_3) {
        EXPECT_EQ(longest_wait(spans).detail, 3) << mesh_dim;
      }
      for (const auto& wait : of_kind(spans, SpanKind::Wait)) EXPECT_NE(wait.detail, rank());
    }
  });
}

TEST(GlooSpansOnThreads, TellGroupsApart) {
  run_threads(4,
              [] {
                const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
                SpanRecorder recorder;
                all_reduce(torch::ones({4}), ReduceOp::SUM, mesh.group("tp"));
                const auto spans = of_kind(recorder.take(), SpanKind::Communication);
                ASSERT_FALSE(spans.empty());
                EXPECT_NE(
                    std::string(spans.back().name).find(rank() < 2 ? "ranks 0,1" : "ranks 2,3"),
                    std::string::npos)
                    << spans.back().name;
              },
              {.backend = "gloo"});
}

}  // namespace
}  // namespace tessera::testing
