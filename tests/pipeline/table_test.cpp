// Tables of actions without ranks: what is in them, what is refused, and how long ranks wait.
#include <tessera/pipeline.h>

#include "pipeline/nets.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Le;
using Kind = PipelineAction::Kind;

std::string text_of(const PipelineTable& table) {
  std::ostringstream out;
  out << table;
  return out.str();
}

double bubble(PipelineSchedule schedule, int ranks, int microbatches, int per_rank = 0) {
  return simulate_pipeline(make_pipeline_table(schedule, ranks, microbatches, per_rank))
      .bubble_share;
}

TEST(PipelineTable, IsReadable) {
  EXPECT_EQ(text_of(make_pipeline_table(PipelineSchedule::GPipe, 2, 2)),
            "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n");
  EXPECT_EQ(text_of(make_pipeline_table(PipelineSchedule::OneFOneB, 2, 3)),
            "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n");
  EXPECT_EQ(text_of(make_pipeline_table(PipelineSchedule::ZeroBubble, 2, 3)),
            "rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n"
            "rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2\n");
  EXPECT_EQ(text_of(make_pipeline_table(PipelineSchedule::Interleaved1F1B, 2, 2)),
            "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1\n");
}

TEST(PipelineTable, OfEverySizeIsVerified) {
  for (const auto schedule : kSchedules) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (int microbatches = 1; microbatches <= 28; ++microbatches) {
        const bool is_interleaved = schedule == PipelineSchedule::Interleaved1F1B;
        if (is_interleaved && microbatches % std::max(1, microbatches / ranks) != 0) continue;
        for (const int per_rank : is_interleaved ? std::vector{1, 2, 3, 5} : std::vector{0})
          verify_pipeline_table(make_pipeline_table(schedule, ranks, microbatches, per_rank));
      }
    }
  }
}

TEST(PipelineTable, LeavesTheBubbleOfItsFormula) {
  for (const int p : {2, 3, 4, 8}) {
    for (const int m : {p, 2 * p, 5 * p}) {
      const double idle = p - 1;
      for (const auto schedule : {PipelineSchedule::GPipe, PipelineSchedule::OneFOneB})
        EXPECT_NEAR(bubble(schedule, p, m), idle / (m + idle), 1e-12) << schedule << p << " " << m;
      EXPECT_NEAR(bubble(PipelineSchedule::ZeroBubble, p, m), idle / (3 * m + idle), 1e-12);
      for (const int v : {1, 2, 3}) {
        EXPECT_NEAR(bubble(PipelineSchedule::Interleaved1F1B, p, m, v), idle / (v * m + idle),
                    1e-12);
      }
      const double v_shape = bubble(PipelineSchedule::ZBVZeroBubble, p, m);
      EXPECT_GE(v_shape, idle / (6 * m + idle) - 1e-12);
      EXPECT_LE(v_shape, 1.5 * idle / (6 * m + 1.5 * idle)) << p << " " << m;
    }
  }
}

TEST(PipelineTable, HoldsAsManyMicrobatchesAsTheScheduleSays) {
  const auto held = [](PipelineSchedule schedule) {
    return simulate_pipeline(make_pipeline_table(schedule, 4, 16)).most_held;
  };
  EXPECT_THAT(held(PipelineSchedule::GPipe), Each(16));
  EXPECT_EQ(held(PipelineSchedule::OneFOneB), (std::vector{4, 3, 2, 1}));
  EXPECT_THAT(held(PipelineSchedule::ZeroBubble), Each(Le(4)));
  EXPECT_THAT(held(PipelineSchedule::ZBVZeroBubble), Each(Le(8))) << "of half a stage each";
}

TEST(PipelineTable, TakesCostsThatDiffer) {
  const auto table = make_pipeline_table(PipelineSchedule::GPipe, 2, 2);
  const auto result =
      simulate_pipeline(table, {.forward = 2, .backward_input = 3, .backward_weight = 1});
  EXPECT_DOUBLE_EQ(result.duration, 3 * 2 + 3 * 4);
  EXPECT_DOUBLE_EQ(result.bubble_share, 6.0 / 18);
}

class PipelineTableErrors : public ::testing::Test {
 protected:
  PipelineTable table = make_pipeline_table(PipelineSchedule::ZeroBubble, 2, 2);
  std::vector<PipelineAction>& first = table.actions[0];
  std::string message() {
    return message_of([&] { verify_pipeline_table(table); });
  }
};

TEST_F(PipelineTableErrors, OfMissingActionsNameThem) {
  first.pop_back();
  EXPECT_THAT(message(), HasSubstr("microbatch 1 at stage 0, but rank 0 lacks its W"));
}

TEST_F(PipelineTableErrors, OfRepeatedActionsNameThem) {
  first.push_back({0, Kind::Forward, 1});
  EXPECT_THAT(message(), HasSubstr("rank 0's 0F1 is there twice"));
  first.back() = {0, Kind::Backward, 1};
  EXPECT_THAT(message(), HasSubstr("rank 0's 0B1 is a second backward"));
}

TEST_F(PipelineTableErrors, OfOrderNameTheAction) {
  std::swap(first[0], first[2]);
  EXPECT_THAT(message(), HasSubstr("rank 0's 0I0 comes before its forward"));
}

TEST_F(PipelineTableErrors, OfForeignStagesNameTheOwner) {
  first[0].stage = 1;
  EXPECT_THAT(message(), HasSubstr("expected 1F0 on rank 1, which has that stage"));
  first[0].stage = 2;
  EXPECT_THAT(message(), HasSubstr("expected stages from 0 to 1"));
  table.stage_ranks = {0, 0};
  EXPECT_THAT(message(), HasSubstr("stages on each of the 2 ranks"));
}

TEST_F(PipelineTableErrors, OfDeadlocksNameWhatWaits) {
  table = make_pipeline_table(PipelineSchedule::GPipe, 2, 2);
  // Rank 0 wants the first gradient before it sends the second activation; rank 1 the reverse.
  table.actions[0] = {
      {0, Kind::Forward, 0}, {0, Kind::Backward, 0}, {0, Kind::Forward, 1}, {0, Kind::Backward, 1}};
  EXPECT_THAT(message(), HasSubstr("wait for each other forever: rank 0 at 0B0, rank 1 at 1F1"));
}

TEST_F(PipelineTableErrors, OfSizesSayWhatFits) {
  EXPECT_THAT(message_of([] { make_pipeline_table(PipelineSchedule::GPipe, 0, 2); }),
              HasSubstr("at least 1 rank"));
  EXPECT_THAT(message_of([] { make_pipeline_table(PipelineSchedule::GPipe, 2, 0); }),
              HasSubstr("at least 1 microbatch"));
  EXPECT_THAT(message_of([] { make_pipeline_table(PipelineSchedule::ZeroBubble, 2, 2, 2); }),
              HasSubstr("expected 1 for stages_per_rank of ZeroBubble, got 2"));
  EXPECT_THAT(message_of([] { make_pipeline_table(PipelineSchedule::Interleaved1F1B, 2, 5); }),
              HasSubstr("take a multiple of 2"));
}

}  // namespace
}  // namespace tessera::testing
