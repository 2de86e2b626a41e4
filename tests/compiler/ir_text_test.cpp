#include <tessera/compile.h>

#include "compiler/ir/operators.h"
#include "support/message_of.h"
#include "support/random.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace tessera::compiler {
namespace {

using testing::message_of;

constexpr const char* kStep = R"(input %0: float32[4, 8] = parameter "net1.weight"
input %1: float32[2, 8] placement=Shard(0) = argument "argument 0"
input %2: float32[4, 8] = state "exp_avg of net1.weight"
%3: float32[8, 4] strides=[1, 8] = aten::t(%0)  # net1
%4: float32[2, 4] placement=Partial(sum) = aten::mm(%1, %3)  # net1
%5: bfloat16[2, 4] = aten::_to_copy(%4, dtype=bfloat16)
%6: float32[2, 4] = _c10d_functional::all_reduce(%4, "sum", "0")
%7: float32[2, 4] = _c10d_functional::wait_tensor(%6)
[%8: float32[1, 4], %9: float32[1, 4]] = aten::split_with_sizes(%7, [1, 1])
%10: float32[1, 4], %11: float32[1, 1], %12: float32[1, 1] = aten::native_layer_norm(%8, [4], None, _, 1e-05)
%13: float32[4, 8] = aten::add.Tensor(%0, %2, alpha=-0.5)
%14: float32[4, 8] = aten::clone(%2)
%15: float32[4, 8] = aten::mul_.Tensor(%14!, number(0.9))
[%16: float32[1, 4]] = aten::_foreach_add_.Scalar([%10!], 1)
%17: float32[2, 4] = tessera::fused(%7) {  # "odd path"
  input %0: float32[2, 4] = outside ""
  %1: float32[2, 4] = aten::mul.Scalar(%0, 0.1)
  return %1
}
return %17
return _
write %13 to %0
write %15 to %2
)";

TEST(IrText, PrintsWhatItHasParsed) { EXPECT_EQ(Graph::parse(kStep).str(), kStep); }

TEST(IrText, SkipsCommentsAndBlankLines) {
  EXPECT_EQ(Graph::parse("# a step\n\n" + std::string(kStep) + "\n   # end\n").str(), kStep);
}

TEST(IrText, KeepsWhatIsNotInTheTextOfANode) {
  const Graph graph = Graph::parse(kStep);
  EXPECT_EQ(graph.nodes[0].module, "net1");
  EXPECT_EQ(graph.nodes.back().module, "odd path");
  ASSERT_EQ(graph.nodes[2].arguments.size(), 7U);  // with the defaults
  EXPECT_TRUE(graph.nodes[2].arguments[2].constant.isNone());
  EXPECT_EQ(graph.nodes[7].arguments[2].constant.toDouble(), -0.5);
  EXPECT_EQ(graph.type(4).placement, Partial());
  EXPECT_EQ(graph.inputs[2].kind, InputKind::State);
  EXPECT_EQ(graph.outputs[2].target, 0);
}

/// The constant after it has been written and read as an argument of the operator.
c10::IValue through_text(const std::string& op, size_t argument, const c10::IValue& constant) {
  const auto schema = find_operator(op)->schema();
  Graph graph;
  Node node{.op = op, .arguments = {}, .results = {}};
  for (const auto& declared : schema.arguments()) {
    if (declared.type()->kind() == c10::TypeKind::TensorType) {
      const ValueId value = graph.add_value({.sizes = {2}, .strides = {1}});
      graph.inputs.push_back({value, InputKind::Outside, "x"});
      node.arguments.push_back(Argument::of(value));
    } else {
      node.arguments.push_back(Argument::of(declared.default_value().value_or(c10::IValue())));
    }
  }
  node.arguments[argument] = Argument::of(constant);
  node.results = {Argument::of(graph.add_value({.sizes = {2}, .strides = {1}}))};
  graph.nodes = {node};
  const std::string text = graph.str();
  const Graph parsed = Graph::parse(text);
  EXPECT_EQ(parsed.str(), text);
  return parsed.nodes[0].arguments[argument].constant;
}

TEST(IrText, KeepsNumbersExactly) {
  for (const double number :
       {0.1, -0.0, 0.0, 1.0, 1e300, 5e-324, 1.0 / 3, 1e16, -123456789.0,
        std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    const auto back = through_text("aten::mul.Scalar", 1, number);
    ASSERT_TRUE(back.isDouble()) << number;
    EXPECT_EQ(back.toDouble(), number);
    EXPECT_EQ(std::signbit(back.toDouble()), std::signbit(number));
  }
  EXPECT_TRUE(std::isnan(through_text("aten::mul.Scalar", 1, std::nan("")).toDouble()));
  for (const int64_t number : {int64_t{0}, int64_t{-7}, std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::min()}) {
    const auto back = through_text("aten::mul.Scalar", 1, number);
    ASSERT_TRUE(back.isInt());
    EXPECT_EQ(back.toInt(), number);
  }
  EXPECT_TRUE(through_text("aten::mul.Scalar", 1, true).isBool());
  EXPECT_EQ(through_text("aten::mul.Scalar", 1, c10::complex<double>(1, -2.5)).toComplexDouble(),
            c10::complex<double>(1, -2.5));
}

TEST(IrText, KeepsConstantsOfOtherTypes) {
  const auto dtype = through_text("aten::_to_copy", 1, static_cast<int64_t>(at::kHalf));
  EXPECT_EQ(dtype.toScalarType(), at::kHalf);
  EXPECT_EQ(through_text("aten::_to_copy", 2, static_cast<int64_t>(at::kStrided)).toLayout(),
            at::kStrided);
  EXPECT_EQ(through_text("aten::_to_copy", 3, c10::Device("cuda:1")).toDevice().str(), "cuda:1");
  const auto format = static_cast<int64_t>(at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(through_text("aten::_to_copy", 6, format).toMemoryFormat(),
            at::MemoryFormat::ChannelsLast);
  const auto sizes = through_text("aten::view", 1, std::vector<int64_t>{3, -1});
  ASSERT_TRUE(sizes.isIntList());
  EXPECT_EQ(sizes.toIntVector(), (std::vector<int64_t>{3, -1}));
  EXPECT_TRUE(through_text("aten::view", 1, std::vector<int64_t>{}).isIntList());
  const std::string odd = "a \"b\"\\\n\x01 c";
  EXPECT_EQ(through_text("aten::gelu", 1, odd).toStringRef(), odd);
}

TEST(IrText, KeepsTensorsThatAreNumbers) {
  auto weak = at::scalar_tensor(2.5, at::kDouble);
  weak.unsafeGetTensorImpl()->set_wrapped_number(true);
  const auto back = through_text("aten::mul.Tensor", 1, weak).toTensor();
  EXPECT_TRUE(back.unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_EQ(back.item<double>(), 2.5);
  const auto strong = through_text("aten::mul.Tensor", 1, at::scalar_tensor(0.1, at::kFloat));
  EXPECT_EQ(strong.toTensor().scalar_type(), at::kFloat);
  EXPECT_EQ(strong.toTensor().item<float>(), 0.1F);
  EXPECT_FALSE(strong.toTensor().unsafeGetTensorImpl()->is_wrapped_number());
}

/// A tensor whose dtype is a number's own is no number for that.
TEST(IrText, KeepsDtypesOfTensors) {
  for (const auto dtype : {at::kDouble, at::kLong, at::kBool, at::kComplexDouble, at::kHalf}) {
    const auto tensor = at::scalar_tensor(1, dtype);
    const auto back = through_text("aten::mul.Tensor", 1, tensor).toTensor();
    EXPECT_EQ(back.scalar_type(), dtype);
    EXPECT_FALSE(back.unsafeGetTensorImpl()->is_wrapped_number()) << dtype;
  }
}

/// Whoever wrote it: neither the stack nor memory overflows.
TEST(IrText, HostileTextsAreRefused) {
  const std::string input = "input %0: float32[2] = argument \"x\"\n";
  const auto error_of = [&](const std::string& text) {
    return message_of([&] { Graph::parse(input + text); });
  };
  constexpr int kDeep = 200'000;
  for (const char* word : {"number(", "tensor("}) {
    std::string nested = "%1: float32[2] = aten::mul.Tensor(%0, ";
    for (int i = 0; i < kDeep; ++i) nested += word;
    EXPECT_NE(error_of(nested + "1").find("line 2: expected a number"), std::string::npos);
  }
  std::string bodies;
  for (int i = 1; i <= 30; ++i) {
    bodies += "%" + std::to_string(i) +
              ": float32[2] = tessera::fused(%0) {\n"
              "input %1048575: float32[2] = argument \"x\"\nreturn %1048575\n}\n";
  }
  EXPECT_NE(error_of(bodies).find("expected fewer or smaller numbers of values"),
            std::string::npos);
  EXPECT_NE(error_of("%1: float32[2] = aten::mul.Tensor(%0, tensor(1, bits8))")
                .find("line 2: expected a dtype of numbers before this"),
            std::string::npos);
}

TEST(IrText, ErrorsNameTheLineAndWhatWasExpected) {
  const auto error_of = [](const std::string& text) {
    return message_of([&] { Graph::parse(text); });
  };
  const std::string input = "input %0: float32[4] = parameter \"w\"\n";
  EXPECT_EQ(error_of("input %0: float33[4] = parameter \"w\""),
            "Graph::parse: line 1: expected a dtype such as float32 before this, got '[4] = "
            "parameter \"w\"'");
  EXPECT_EQ(error_of(input + "\n%1: float32[4] = aten::relu(%2)"),
            "Graph::parse: line 3: expected a value that is defined above, not %2,, got ')'");
  EXPECT_EQ(error_of(input + "%1: float32[4] = aten::rellu(%0)"),
            "Graph::parse: line 2: expected an operator that libtorch knows, not 'aten::rellu',, "
            "got '(%0)'");
  EXPECT_NE(error_of(input + "%1: float32[4] = aten::relu()").find("an argument 'self'"),
            std::string::npos);
  EXPECT_NE(error_of(input + "%1: float32[4] = aten::relu_(%0)").find("a '!' at argument 'self'"),
            std::string::npos);
  EXPECT_NE(error_of(input + "%1: float32[4] = aten::relu(%0!)").find("no '!' at"),
            std::string::npos);
  EXPECT_NE(error_of(input + "%0: float32[4] = aten::relu(%0)").find("not defined above"),
            std::string::npos);
  EXPECT_NE(error_of(input + "%1: float32[4] = aten::relu(3)").find("Tensor as argument 'self'"),
            std::string::npos);
  EXPECT_NE(error_of(input + "%1: float32[4], %2: float32[4] = aten::relu(%0)").find("1 results"),
            std::string::npos);
  EXPECT_NE(error_of(input + "return %0\n" + input).find("inputs before"), std::string::npos);
  EXPECT_NE(error_of(input + "return %0\nwrite %0 to _").find("an input of the graph"),
            std::string::npos);
  EXPECT_NE(error_of("input %0: float32[99999999999, 99999999999] = outside \"x\"").find("memory"),
            std::string::npos);
  EXPECT_NE(error_of(input + "%1: float32[4] = tessera::fused(%0) {").find("not closed"),
            std::string::npos);
}

/// A text that was damaged is refused or is a graph that prints and parses again.
void expect_no_crash(const std::string& text) {
  try {
    const std::string printed = Graph::parse(text).str();
    EXPECT_EQ(Graph::parse(printed).str(), printed);
  } catch (const c10::ValueError& error) {
    EXPECT_TRUE(std::string(error.what()).find("Graph::parse: line ") != std::string::npos);
  }
}

TEST(IrText, DamagedTextsAreRefusedOrReadable) {
  std::mt19937_64 random(testing::test_seed());
  const std::string whole = kStep;
  const auto draw = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  constexpr int kTexts = 4000;
  for (int i = 0; i < kTexts; ++i) {
    std::string text = whole;
    const size_t begin = draw(text.size());
    switch (draw(4)) {
      case 0:
        text.resize(begin);
        break;
      case 1:
        text.erase(begin, draw(20));
        break;
      case 2:
        text.insert(begin, text.substr(draw(text.size()), draw(30)));
        break;
      default:
        for (size_t flips = 1 + draw(3); flips > 0; --flips)
          text[draw(text.size())] = static_cast<char>(random());
    }
    SCOPED_TRACE(text);
    expect_no_crash(text);
    if (HasFatalFailure() || HasNonfatalFailure()) break;
  }
}

}  // namespace
}  // namespace tessera::compiler
