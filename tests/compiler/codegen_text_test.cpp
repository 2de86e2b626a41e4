// The program text: what users read, and what R-003.7 and R-003.8 look for in it.
#include <tessera/compile.h>

#include "compiler/ir/verify.h"
#include "compiler/kernels/kernels.h"
#include "compiler/kernels/names.h"
#include "compiler/passes/fuse.h"
#include "compiler/runtime/listing.h"
#include "support/temporary_folder.h"

#include <torch/csrc/jit/testing/file_check.h>

#include <cstdlib>

namespace tessera::compiler {
namespace {

Graph fused_graph(const std::string& text) {
  Graph graph = Graph::parse(text);
  verify(graph, "parse");
  fuse(graph);
  verify(graph, "fuse");
  return graph;
}

std::string text_of_program(const std::string& text) { return program_text(fused_graph(text)); }

std::string program_of(const std::string& text) { return text.substr(text.find("\nprogram(")); }

TEST(CodegenNames, AreThoseOfPython) {
  EXPECT_EQ(python_name("aten::add.Tensor"), "aten.add.Tensor");
  EXPECT_EQ(python_name("aten::mm"), "aten.mm.default");
  EXPECT_EQ(python_name("_c10d_functional::wait_tensor"),
            "torch.ops._c10d_functional.wait_tensor.default");
  EXPECT_EQ(short_name("aten::_foreach_div.Scalar"), "div");
  EXPECT_EQ(short_name("aten::_to_copy"), "to_copy");
  EXPECT_EQ(identifier("fc1.weight"), "fc1_weight");
  EXPECT_EQ(identifier("exp_avg of 0.weight"), "exp_avg_of_0_weight");
  EXPECT_EQ(identifier("0.weight"), "v0_weight");
  EXPECT_EQ(identifier("größe*/\n"), "gr_e");
  EXPECT_EQ(identifier(""), "v");
}

TEST(CodegenNames, AreDifferentAndNotWordsOfTheLanguage) {
  const Graph graph = Graph::parse(R"(input %0: float32[4] = parameter "a.b"
input %1: float32[4] = parameter "a_b"
input %2: float32[4] = parameter "new"
%3: float32[4] = aten::relu(%0)
%4: float32[4] = aten::relu(%1)
return %3
)");
  const std::vector<std::string> expected = {"a_b", "a_b_1", "new_", "relu", "relu_1"};
  EXPECT_EQ(name_values(graph), expected);
}

// Three buckets, as they come out of bucket_all_reduces and schedule_waits.
std::string coalesced_buckets() {
  std::string text;
  for (int i = 0; i < 6; ++i)
    text += "input %" + std::to_string(i) + ": float32[" + std::to_string(10 + i) +
            "] = outside \"g" + std::to_string(i) + "\"\n";
  for (int bucket = 0; bucket < 3; ++bucket) {
    const auto value = [&](int offset) { return 6 + 4 * bucket + offset; };
    const auto typed = [&](int offset) {
      return "%" + std::to_string(value(offset)) + ": float32[" +
             std::to_string(10 + 2 * bucket + offset % 2) + "]";
    };
    const auto list = [](int a, const std::string& mark) {
      return "[%" + std::to_string(a) + mark + ", %" + std::to_string(a + 1) + mark + "]";
    };
    text += "[" + typed(0) + ", " + typed(1) + "] = aten::_foreach_div.Scalar(" +
            list(2 * bucket, "") + ", 2)\n";
    text += "[" + typed(2) + ", " + typed(3) + "] = _c10d_functional::all_reduce_coalesced_(" +
            list(value(0), "!") + ", \"sum\", \"0\")\n";
  }
  for (int i = 0; i < 6; ++i) {
    const int launched = 6 + 4 * (i / 2) + 2 + i % 2;
    text += "%" + std::to_string(18 + i) + ": float32[" + std::to_string(10 + i) +
            "] = _c10d_functional::wait_tensor(%" + std::to_string(launched) + ")\n";
  }
  for (int i = 0; i < 6; ++i)
    text += "gradient %" + std::to_string(18 + i) + " of %" + std::to_string(i) + "\n";
  return text;
}

TEST(CodegenText, HasKernelsBeforeCoalescedReductions) {
  const std::string source = text_of_program(coalesced_buckets());
  for (const std::string& text : {source, program_of(source)}) {
    torch::jit::testing::FileCheck()
        .check("cpp_fused_")
        ->check("torch.ops._c10d_functional.all_reduce_coalesced_.default(")
        ->check("cpp_fused_")
        ->check("torch.ops._c10d_functional.all_reduce_coalesced_.default(")
        ->check("cpp_fused_")
        ->check("torch.ops._c10d_functional.all_reduce_coalesced_.default(")
        ->check("torch.ops._c10d_functional.wait_tensor.default")
        ->check("torch.ops._c10d_functional.wait_tensor.default")
        ->check("torch.ops._c10d_functional.wait_tensor.default")
        ->run(text);
  }
  // Values go when they have been used for the last time.
  EXPECT_NE(source.find("free(div, div_1)"), std::string::npos) << source;
}

std::string concatenated_buckets() {
  std::string inputs;
  for (int i = 0; i < 6; ++i)
    inputs += "input %" + std::to_string(i) + ": float32[5, 2] = outside \"g" + std::to_string(i) +
              "\"\n";
  std::string launches;
  std::string waits;
  std::string outputs;
  for (int bucket = 0; bucket < 3; ++bucket) {
    const auto value = [&](int number) { return "%" + std::to_string(6 + 5 * bucket + number); };
    for (int i = 0; i < 2; ++i)
      launches += value(i) + ": float32[10] = aten::flatten.using_ints(%" +
                  std::to_string(2 * bucket + i) + ")\n";
    launches += value(2) + ": float32[20] = aten::cat([" + value(0) + ", " + value(1) + "])\n";
    launches += value(3) + ": float32[20] = aten::div.Scalar(" + value(2) + ", 2)\n";
    launches += value(4) + ": float32[20] = _c10d_functional::all_reduce_(" + value(3) +
                "!, \"sum\", \"0\")\n";
    const std::string waited = "%" + std::to_string(21 + bucket);
    waits += waited + ": float32[20] = _c10d_functional::wait_tensor(" + value(4) + ")\n";
    outputs += "return " + waited + "\n";
  }
  return inputs + launches + waits + outputs;
}

TEST(CodegenText, HasConcatenationAndDivisionInOneKernel) {
  const std::string program = program_of(text_of_program(concatenated_buckets()));
  torch::jit::testing::FileCheck()
      .check("aten.flatten.using_ints(")
      ->check("cpp_fused_cat_div_")
      ->check_not("coalesced")
      ->check("torch.ops._c10d_functional.all_reduce_.default(")
      ->check("aten.flatten.using_ints(")
      ->check("cpp_fused_cat_div_")
      ->check("torch.ops._c10d_functional.all_reduce_.default(")
      ->check("aten.flatten.using_ints(")
      ->check("cpp_fused_cat_div_")
      ->check("torch.ops._c10d_functional.all_reduce_.default(")
      ->check("torch.ops._c10d_functional.wait_tensor.default")
      ->check("torch.ops._c10d_functional.wait_tensor.default")
      ->check("torch.ops._c10d_functional.wait_tensor.default")
      ->run(program);
}

TEST(CodegenText, HasEqualKernelsOnce) {
  const std::string source = text_of_program(concatenated_buckets());
  EXPECT_NE(source.find("cpp_fused_cat_div_0"), std::string::npos);
  EXPECT_EQ(source.find("cpp_fused_cat_div_1"), std::string::npos) << source;
}

/// Parameters may be called as macros, types and kernels are.
TEST(CodegenText, CompilesWithNamesOfMacrosTypesAndKernels) {
  std::string inputs;
  std::string nodes;
  std::string outputs;
  const std::vector<std::string> names = {"NULL",
                                          "errno",
                                          "M_PI",
                                          "M_PIl",
                                          "INT64_MIN",
                                          "INFINITY",
                                          "_GNU_SOURCE",
                                          "bfloat16",
                                          "int64_t",
                                          "float16",
                                          "int32_t",
                                          "SHARED",
                                          "math_errhandling",
                                          "NULL_",
                                          "Value",
                                          "std",
                                          "stdin",
                                          "cpp_fused_neg_abs_0"};
  const std::vector<std::string> dtypes = {"bfloat16", "int64", "float16", "int32"};
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string type = dtypes[i % dtypes.size()] + "[4]";
    const auto value = [&](size_t which) { return "%" + std::to_string(3 * i + which); };
    inputs += c10::str("input ", value(0), ": ", type, " = parameter \"", names[i], "\"\n");
    nodes += c10::str(value(1), ": ", type, " = aten::neg(", value(0), ")\n", value(2), ": ", type,
                      " = aten::abs(", value(1), ")\n");
    outputs += "return " + value(2) + "\n";
  }
  const testing::TemporaryFolder folder;
  setenv("TESSERA_CACHE", folder.path().c_str(), 1);
  const auto kernels = write_kernels(fused_graph(inputs + nodes + outputs));
  std::string why;
  EXPECT_TRUE(load_kernels(kernels, &why)) << why << kernels.text();
  unsetenv("TESSERA_CACHE");
}

constexpr const char* kSmallStep = R"(input %0: float32[3, 2] = parameter "fc.weight"
input %1: float32[4, 2] = argument "argument 0"
input %2: float32[3] = parameter "fc.bias"
input %11: float64[] = state "lr"
%3: float32[2, 3] strides=[1, 2] = aten::t(%0)
%4: float32[4, 3] = aten::addmm(%2, %1, %3)
%5: float32[4, 3] = aten::relu(%4)
%6: float32[4, 3] = aten::mul.Scalar(%5, 0.1)
%7: float32[3, 4] strides=[1, 3] = aten::t(%6)
%8: float32[3, 2] = aten::mm(%7, %1)
%9: float32[3, 2] = aten::mul.Tensor(%8, %11)
%10: float32[3, 2] = aten::add.Tensor(%0, %9)
return %5
write %10 to %0
)";

// A change of this text is a change of every user's program: look at the difference.
TEST(CodegenText, OfASmallStep) {
  const std::string source = text_of_program(kSmallStep);
  EXPECT_EQ(source.substr(source.find("extern \"C\" {\n")),
            R"source(extern "C" {
extern const int tessera_host_interface;
const int tessera_host_interface = 3;
}

extern "C" void cpp_fused_relu_mul_0(const Host& host, void* const* tensors) {
  const float* const in0 = static_cast<const float*>(tensors[0]);
  float* const out0 = static_cast<float*>(tensors[1]);
  float* const out1 = static_cast<float*>(tensors[2]);
  INDEPENDENT
  for (int64_t i = 0; i < 12; ++i) {
    const float x0 = in0[i];
    const float relu = x0 < 0 ? 0 : x0;  // aten.relu.default
    const float mul = relu * 0.1f;  // aten.mul.Scalar
    out0[i] = relu;
    out1[i] = mul;
  }
}

extern "C" void cpp_fused_mul_add_1(const Host& host, void* const* tensors) {
  const float* const in0 = static_cast<const float*>(tensors[0]);
  const double* const in1 = static_cast<const double*>(tensors[1]);
  const float* const in2 = static_cast<const float*>(tensors[2]);
  float* const out0 = static_cast<float*>(tensors[3]);
  const double x1 = in1[0];
  INDEPENDENT
  for (int64_t i = 0; i < 6; ++i) {
    const float x0 = in0[i];
    const float x2 = in2[i];
    const float mul = x0 * static_cast<float>(x1);  // aten.mul.Tensor
    const float add = x2 + mul;  // aten.add.Tensor
    out0[i] = add;
  }
}

program(
  fc_weight,  // float32[3, 2], parameter "fc.weight"
  argument_0,  // float32[4, 2], argument "argument 0"
  fc_bias,  // float32[3], parameter "fc.bias"
  lr,  // float64[], state "lr"
) {
  t = aten.t.default(fc_weight)  // float32[2, 3] strides=[1, 2]
  addmm = aten.addmm.default(fc_bias, argument_0, t)  // float32[4, 3]
  free(t)
  // relu = aten.relu.default(addmm)
  // mul = aten.mul.Scalar(relu, 0.1)
  cpp_fused_relu_mul_0(addmm, out relu, out mul)  // float32[4, 3], float32[4, 3]
  free(addmm)
  t_1 = aten.t.default(mul)  // float32[3, 4] strides=[1, 3]
  free(mul)
  mm = aten.mm.default(t_1, argument_0)  // float32[3, 2]
  free(t_1)
  // mul = aten.mul.Tensor(mm, lr)
  // add = aten.add.Tensor(fc_weight, mul)
  cpp_fused_mul_add_1(mm, lr, fc_weight, out add in place of fc_weight)  // float32[3, 2]
  free(mm)
  return relu
}
)source");
}

}  // namespace
}  // namespace tessera::compiler
