// What `tessera inspect --program` says of memory, and of files that are no programs.
#include <tessera/compile.h>

#include "compiler/runtime/program.h"
#include "recorded_steps.h"
#include "support/random.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <random>

namespace tessera::compiler {
namespace {

/// The most bytes that were allocated at a time, of those that this thread allocates.
class PeakMeter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*memory*/, int64_t size, size_t /*total*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    held_ += size;
    peak_ = std::max(peak_, held_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }

 private:
  int64_t held_ = 0, peak_ = 0;
};

int64_t measured_peak(const Graph& graph, const std::vector<at::Tensor>& inputs) {
  Program program(graph);
  program.run(inputs);
  const auto meter = std::make_shared<PeakMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  program.run(inputs);
  return meter->peak();
}

TEST(Layout, PeakIsWhatAProgramAllocates) {
  std::mt19937_64 random(testing::test_seed());
  for (int programs = 0; programs < 50; ++programs) {
    Steps steps;
    std::vector<ValueId> values = {steps.input(at::randn({8, 8})), steps.input(at::randn({8, 8}))};
    for (int i = 0; i < 12; ++i) {
      const auto one = Argument::of(values[random() % values.size()]);
      const auto other = Argument::of(values[random() % values.size()]);
      switch (random() % 5) {
        case 0:
          values.push_back(steps.call("aten::t", {one}));
          break;
        case 1:
          values.push_back(steps.call("aten::relu", {one}));
          break;
        case 2:  // has more bytes
          steps.call("aten::_to_copy", {one, Argument::of(c10::IValue(int64_t{7}))});
          break;
        case 3:
          values.push_back(
              steps.lists("aten::split.Tensor", {one, Argument::of(c10::IValue(int64_t{8}))})[0]);
          break;
        default:
          values.push_back(steps.call("aten::add.Tensor", {one, other}));
      }
    }
    steps.result(values.back());
    EXPECT_EQ(layout_of(steps.graph).peak_bytes, measured_peak(steps.graph, steps.inputs))
        << steps.graph;
  }
}

/// A text is a program that can be laid out, or is refused by an error that says why.
void expect_layout_or_error(const std::string& text) {
  try {
    const auto layout = layout_of(Graph::parse(text));
    for (const auto& buffer : layout.buffers) EXPECT_LE(buffer.first, buffer.last) << text;
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()), "") << text;
  }
}

TEST(Layout, DamagedTextsAreRefusedOrLaidOut) {
  constexpr const char* kText = R"(input %0: bfloat16[4, 6] device=cuda:0 = argument "x"
input %1: bfloat16[6] device=cuda:0 = parameter "w"
%2: bfloat16[4, 6] device=cuda:0, %3: float32[4, 1] device=cuda:0 = tessera::fused(%0, %1) {  # a
  input %0: bfloat16[4, 6] device=cuda:0 = outside ""
  input %1: bfloat16[6] device=cuda:0 = outside ""
  %2: bfloat16[4, 6] device=cuda:0 = aten::mul.Tensor(%0, %1)
  %3: float32[4, 6] device=cuda:0 = aten::_to_copy(%2, dtype=float32)
  %4: float32[4, 1] device=cuda:0 = aten::mean.dim(%3, [-1], True)
  return %2
  return %4
}
%4: bfloat16[6, 4] strides=[1, 6] device=cuda:0 = aten::t(%2)
%5: bfloat16[6, 4] strides=[1, 6] device=cuda:0 = aten::relu_(%4!)
%6: bfloat16[6] device=cuda:0 = aten::mul.Scalar(%1, 0.5)
return %5
gradient %3 of %0
write %6 to %1
)";
  const std::string text = kText;
  std::mt19937_64 random(testing::test_seed());
  const std::string letters = "%0123456789[](){}=:,.!_- abcfilnostu\n\"";
  for (int i = 0; i < 3000; ++i) {
    auto damaged = text;
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const auto at = random() % damaged.size();
      switch (random() % 4) {
        case 0:
          damaged[at] = letters[random() % letters.size()];
          break;
        case 1:
          damaged.erase(at, 1 + random() % 8);
          break;
        case 2:
          damaged.insert(at, damaged.substr(random() % damaged.size(), random() % 40));
          break;
        default:
          damaged.insert(at, std::to_string(random()));
      }
    }
    expect_layout_or_error(damaged);
  }
}

}  // namespace
}  // namespace tessera::compiler
