// Random graphs with reductions of rows and columns, as kernels and operator by operator.
#include "compiler/kernels/row_plan.h"
#include "random_graphs.h"

namespace tessera::compiler {
namespace {

/// Draws one graph over [rows, columns], numbers per row, and numbers per column.
class RowsDraw {
  template <class Choices>
  auto pick(const Choices& choices) {
    return choices[std::uniform_int_distribution<size_t>(0, std::size(choices) - 1)(random_)];
  }

 public:
  RowsDraw(Steps& steps, std::mt19937& random, c10::Device device)
      : steps_(steps), random_(random), device_(device) {
    constexpr int64_t kRows[] = {64, 66, 256, 1024}, kColumns[] = {32, 33, 100, 256, 770};
    rows_ = pick(kRows);
    columns_ = pick(kColumns);
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16};
    const auto options = at::TensorOptions(device_).dtype(pick(kDtypes));
    elements_ = {input({rows_, columns_}, options), input({rows_, columns_}, options)};
    numbers_ = {input({rows_, 1}, options)};
    columns_values_ = {input({columns_}, options)};
  }

  void run() {
    const int operators = std::uniform_int_distribution(5, 40)(random_);
    for (int i = 0; i < operators; ++i) add();
    steps_.result(elements_.back());
    steps_.result(numbers_.back());
    for (const ValueId value : others_) steps_.result(value);
  }

 private:
  bool chance(int percent) { return std::uniform_int_distribution(1, 100)(random_) <= percent; }

  ValueId input(at::IntArrayRef sizes, const at::TensorOptions& options) {
    // Of every second row of a larger one, at times.
    if (sizes.size() == 2 && chance(20))
      return steps_.input(
          at::randn({2 * sizes[0], sizes[1]}, options).slice(0, 0, 2 * sizes[0], 2));
    return steps_.input(at::randn(sizes, options));
  }

  static Argument last() { return number(std::vector<int64_t>{-1}); }

  /// Results stay small, so that rounding does not grow.
  ValueId tamed(ValueId value) {
    return chance(50) ? steps_.call("aten::tanh", {Argument::of(value)}) : value;
  }

  void add() {
    const int kind = std::uniform_int_distribution(0, 9)(random_);
    const ValueId one = pick(elements_);
    if (kind <= 2) {
      constexpr const char* kUnary[] = {"aten::tanh", "aten::sigmoid", "aten::relu", "aten::neg",
                                        "aten::abs",  "aten::gelu",    "aten::silu"};
      elements_.push_back(steps_.call(pick(kUnary), {Argument::of(one)}));
    } else if (kind <= 5) {
      constexpr const char* kBinary[] = {"aten::add.Tensor", "aten::sub.Tensor",
                                         "aten::mul.Tensor"};
      const ValueId other = chance(40)   ? pick(numbers_)
                            : chance(40) ? pick(columns_values_)
                                         : pick(elements_);
      elements_.push_back(
          tamed(steps_.call(pick(kBinary), {Argument::of(one), Argument::of(other)})));
    } else if (kind <= 7) {
      constexpr const char* kReductions[] = {"aten::mean.dim", "aten::amax"};
      numbers_.push_back(steps_.call(pick(kReductions), {Argument::of(one), last(), number(true)}));
    } else if (kind == 8) {
      numbers_.push_back(steps_.call("aten::tanh", {Argument::of(pick(numbers_))}));
    } else if (chance(50)) {
      const ValueId scaled =
          steps_.call("aten::mul.Scalar", {Argument::of(one), number(1.0 / 1024)});
      others_.push_back(steps_.call("aten::sum.dim_IntList",
                                    {Argument::of(scaled), number(std::vector<int64_t>{0})}));
    } else {
      others_.push_back(steps_.call(
          "aten::view", {Argument::of(steps_.call("aten::sigmoid", {Argument::of(one)})),
                         number(std::vector<int64_t>{rows_ / 2, 2, columns_})}));
    }
  }

  Steps& steps_;
  std::mt19937& random_;
  c10::Device device_;
  int64_t rows_ = 0, columns_ = 0;
  std::vector<ValueId> elements_, numbers_, columns_values_, others_;
};

class RowsRandom : public CodegenKernels, public ::testing::WithParamInterface<at::DeviceType> {};

TEST_P(RowsRandom, GraphsComputeWhatOperatorsCompute) {
  if (GetParam() == at::kCUDA && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const RowsOnHost on_host;
  const auto draw = [](Steps& steps, std::mt19937& random) {
    RowsDraw(steps, random, GetParam()).run();
  };
  check_random_graphs(draw, [](at::ScalarType dtype) {
    return dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 0.06;
  });
}

INSTANTIATE_TEST_SUITE_P(Of, RowsRandom, ::testing::Values(at::kCPU, at::kCUDA),
                         [](const auto& info) {
                           return info.param == at::kCPU ? "Host" : "OnCuda";
                         });

}  // namespace
}  // namespace tessera::compiler
