// Kernels over rows: what norms, softmax, losses and biases' gradients are made of.
#include <tessera/compile.h>

#include "compiler/kernels/buffers.h"
#include "compiler/kernels/nvrtc.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/passes.h"
#include "kernel_runs.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

namespace tessera::compiler {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
namespace F = torch::nn::functional;

struct Shape {
  int64_t rows, columns;
};

// Rows of one warp and of a block, rows that no vector divides, parts of columns, a vocabulary.
const Shape kShapes[] = {{64, 32},    {96, 768},  {1056, 100}, {1024, 33},
                         {2048, 384}, {66, 1152}, {64, 4100},  {65, 50304}};

using Function = Tensor (*)(const std::vector<Tensor>&);

struct RowCase {
  const char* name;
  Function function;  // of x and a residual [rows, columns], a weight and a bias [columns]

  /// A vocabulary is what losses are over.
  bool takes(const Shape& shape) const {
    return shape.columns < 10000 || std::string(name).starts_with("CrossEntropy");
  }
};

Tensor as_targets(const std::vector<Tensor>& given) {
  const int64_t rows = given[0].size(0), classes = given[0].size(1);
  return (torch::arange(rows, torch::device(given[0].device()).dtype(torch::kLong)) * 7) % classes;
}

Tensor low(const Tensor& tensor) {
  return tensor.scalar_type() == torch::kDouble ? tensor : tensor.to(torch::kBFloat16);
}

const RowCase kCases[] = {
    {"LayerNorm",
     [](const std::vector<Tensor>& given) {
       const int64_t columns = given[0].size(1);
       const auto stream = given[0] + given[1];
       const auto y = torch::layer_norm(stream, {columns}, given[2], given[3]);
       return (y * y.detach().sin()).sum() + stream.square().sum();
     }},
    {"LayerNormWithoutWeights",
     [](const std::vector<Tensor>& given) {
       const auto y = torch::layer_norm(given[0], {given[0].size(1)});
       return (y * given[1]).sum() + given[2].sum() + given[3].sum();
     }},
    {"LayerNormOfThreeDims",
     [](const std::vector<Tensor>& given) {
       const int64_t columns = given[0].size(1);
       const auto x = given[0].narrow(0, 0, 64).view({4, 16, columns}) * 2;
       const auto y = torch::layer_norm(x, {columns}, given[2], given[3]);
       return (y * given[1].narrow(0, 0, 64).view({4, 16, columns})).sum();
     }},
    {"RmsNorm",
     [](const std::vector<Tensor>& given) {
       const auto y = torch::rms_norm(given[0] + given[1], {given[0].size(1)}, given[2], 1e-6);
       return (y * y.detach().cos()).sum() + given[3].sum();
     }},
    {"RmsNormByHand",
     [](const std::vector<Tensor>& given) {
       const auto x = given[0] + given[1];
       const auto y = x * (x.pow(2).mean(-1, true) + 1e-6).rsqrt() * given[2] + given[3];
       return (y * y.detach().cos()).sum();
     }},
    {"Means",
     [](const std::vector<Tensor>& given) {
       const auto centred = given[0] - given[0].mean(1, true) + given[1].mean(0, true);
       return (centred.square().mean(-1, true).expand_as(given[1]) * given[2]).sum() +
              given[3].mean();
     }},
    {"Softmax",
     [](const std::vector<Tensor>& given) {
       return ((given[0] * given[2] + given[3]).softmax(1) * given[1]).sum();
     }},
    {"LogSoftmax",
     [](const std::vector<Tensor>& given) {
       return ((given[0] * given[2] + given[3]).log_softmax(-1) * given[1]).sum();
     }},
    {"CrossEntropy",
     [](const std::vector<Tensor>& given) {
       return F::cross_entropy(given[0] * given[2] + given[3], as_targets(given)) + given[1].sum();
     }},
    {"CrossEntropyLow",
     [](const std::vector<Tensor>& given) {
       const auto logits = low(given[0] + given[1]).to(given[0].scalar_type());
       return F::cross_entropy(logits, as_targets(given)) + (given[2] * given[3]).sum();
     }},
    {"CrossEntropyIgnoring",
     [](const std::vector<Tensor>& given) {
       auto targets = as_targets(given);
       targets = torch::where(targets % 3 == 0, torch::full_like(targets, 5), targets);
       return F::cross_entropy(given[0] * given[2] + given[3], targets,
                               F::CrossEntropyFuncOptions().ignore_index(5)) +
              given[1].sum();
     }},
    {"CrossEntropyBySums",
     [](const std::vector<Tensor>& given) {
       return F::cross_entropy(given[0] + given[1], as_targets(given),
                               F::CrossEntropyFuncOptions().reduction(torch::kSum)) +
              (given[2] * given[3]).sum();
     }},
    {"CrossEntropyOfEach",
     [](const std::vector<Tensor>& given) {
       const auto each = F::cross_entropy(given[0] + given[1], as_targets(given),
                                          F::CrossEntropyFuncOptions().reduction(torch::kNone));
       return each.square().sum() + (given[2] * given[3]).sum();
     }},
    {"LayerNormOfOneRow",
     [](const std::vector<Tensor>& given) {
       const auto x = given[0].select(0, 1) * 2;
       const auto y = torch::layer_norm(x, {x.size(0)}, given[2], given[3]) + given[1].select(0, 2);
       const auto other = torch::layer_norm(given[0] + given[1], {x.size(0)}, given[2], given[3]);
       return (y * y.detach().cos()).sum() + (other * other.detach().sin()).sum();
     }},
    {"LayerNormOfSomeGradients",
     [](const std::vector<Tensor>& given) {
       const int64_t columns = given[0].size(1);
       // Of the first norm's parameters, one needs no gradient.
       const auto y = torch::layer_norm(given[0], {columns}, given[2].detach(), given[3]);
       const auto z = torch::layer_norm(y + given[1], {columns}, given[2], given[3].detach());
       return (z * z.detach().sin()).sum();
     }},
    {"MaskedSoftmax",
     [](const std::vector<Tensor>& given) {
       const auto mask = given[2].detach() > 1.0;
       const auto masked = (given[0] + given[3]).masked_fill(mask, -INFINITY);
       return (masked.softmax(-1) * given[1]).sum() + given[2].sum();
     }},
    {"Transposed",
     [](const std::vector<Tensor>& given) {
       const auto turned = given[1].detach().t().contiguous().t();
       const auto y = ((given[0] + turned) * given[2] + given[3]).softmax(-1);
       return (y * y.detach().sin()).sum() + given[1].sum();
     }},
    {"Biases",
     [](const std::vector<Tensor>& given) {
       const auto y = torch::gelu(given[0] * given[2] + given[3]) * given[1];
       return (y * y.detach()).sum();
     }},
    {"Low",
     [](const std::vector<Tensor>& given) {
       const auto stream = low(given[0]) + low(given[1]);
       const auto y = torch::layer_norm(stream.to(given[0].scalar_type()), {given[0].size(1)},
                                        given[2], given[3]);
       return (low(y).to(given[0].scalar_type()) * given[1].detach()).sum();
     }},
};

Tensor step_of(const Tensor& logits, const Tensor& targets) {
  logits.mutable_grad() = Tensor();
  const auto loss = F::cross_entropy(logits, targets);
  loss.backward();
  return loss.detach();
}

TEST(RowsOfGraphs, SumsOfPartsKeepPlacesOfThoseThatNobodyNeeds) {
  Graph graph = Graph::parse(R"(input %0: float32[1024, 64] = argument "x"
input %1: float32[1024, 64] = argument "y"
[%2: float32[64], %3: float32[64]] = tessera::sum_parts([%0, %1])
return %3
)");
  for (int i = 0; i < 4; ++i) graph.type(i).device = c10::Device(at::kCUDA, 0);
  fuse(graph);
  ASSERT_EQ(graph.nodes.size(), 1U);
  const auto kernels = write_kernels(graph);
  EXPECT_EQ(kernels.uses.at(0)->kernel.inputs.size(), 2U);
  EXPECT_EQ(kernels.uses.at(0)->kernel.outputs, 2U);
}

TEST(RowsOfGraphs, CastsOfParametersAreOneKernel) {
  Graph graph = Graph::parse(R"(input %0: float32[64, 32] = parameter "first"
input %1: float32[7] = parameter "second"
input %2: float32[64, 32] = argument "x"
%3: bfloat16[64, 32] = aten::_to_copy(%0, dtype=bfloat16)
%4: float32[64, 32] = aten::add.Tensor(%2, %2)
%5: bfloat16[7] = aten::_to_copy(%1, dtype=bfloat16)
%6: bfloat16[64, 32] = aten::_to_copy(%4, dtype=bfloat16)
return %3
return %5
return %6
)");
  for (int i = 0; i < 7; ++i) graph.type(i).device = c10::Device(at::kCUDA, 0);
  join_casts(graph);
  verify(graph, "join_casts");
  ASSERT_EQ(graph.nodes.size(), 3U);
  EXPECT_EQ(graph.nodes[0].op, "tessera::casts");
  EXPECT_EQ(graph.nodes[2].op, "aten::_to_copy");
  fuse(graph);
  const auto kernels = write_kernels(graph);
  EXPECT_TRUE(kernels.uses.at(0)->kernel.takes_list);
  std::string why;
  const auto* nvrtc = Nvrtc::find(&why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  EXPECT_TRUE(nvrtc->compile(kernels.text(), "sm_90", &why)) << why << kernels.text();
}

TEST(RowsOfGraphs, OutputsLieWhereNothingIsReadAgain) {
  Graph graph = Graph::parse(R"(input %0: float32[64, 40000] = argument "x"
%1: float32[64, 40000] = aten::cumsum(%0, 1)
%2: float32[64, 40000] = aten::exp(%1)
%3: float32[64, 1] = aten::mean.dim(%2, [-1], True)
%4: float32[64, 40000] = aten::sub.Tensor(%2, %3)
return %2
return %3
return %4
)");
  for (int i = 0; i < 5; ++i) graph.type(i).device = c10::Device(at::kCUDA, 0);
  fuse(graph);
  ASSERT_EQ(graph.nodes.size(), 2U);
  // A row of that length is read again in the second phase, before which %2 is written.
  EXPECT_THAT(overwritable_inputs(graph), ::testing::ElementsAre(-1, -1, -1, -1, 1));
}

TEST(RowsOfGraphs, CrossEntropyAndItsGradientAreOneKernel) {
  const RowsOnHost on_host;
  const auto logits = torch::randn({256, 100}).requires_grad_();
  const auto targets = torch::arange(256) % 100;
  const testing::TemporaryFolder cache;
  setenv("TESSERA_CACHE", cache.path().c_str(), 1);
  auto step = compile([&] { return step_of(logits, targets); }, {.fullgraph = true});
  for (int i = 0; i < 3; ++i) step();
  unsetenv("TESSERA_CACHE");
  const auto code = generated_code(step);
  // Whether targets are classes, the loss of each row, the gradient.
  EXPECT_THAT(
      code, ::testing::ContainsRegex("cpp_fused_amax[^\n]*out logical_or, out where, out sub\\)"));
}

/// Rows that begin with masked logits, grow, or hold what is not finite.
void expect_log_softmax_of_special_rows(torch::Device device) {
  const RowsOnHost on_host;
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    torch::manual_seed(5);
    auto logits = torch::randn({64, 100}, torch::kDouble);
    logits[1].slice(0, 0, 60).fill_(-kInf);
    logits[2].fill_(-kInf);
    logits[3][7] = kInf;
    logits[4].slice(0, 3, 5).fill_(kInf);
    logits[5][99] = NAN;
    logits[6] = torch::arange(100) * 3.0;
    logits[7] = torch::arange(100) * -3.0;
    logits[8] -= 100;
    logits[9] += 100;
    logits[10][0] = NAN;
    logits = logits.to(device, dtype);
    const auto weights = torch::randn({64, 100}, torch::kDouble).to(device, dtype);
    const auto step = [](Tensor x, Tensor w) {
      const auto y = x.log_softmax(-1);
      return std::vector<Tensor>{y, at::_log_softmax_backward_data(w, y, -1, x.scalar_type())};
    };
    auto compiled = compile(step, {.fullgraph = true});
    const auto wanted = step(logits, weights);
    std::vector<Tensor> got;
    for (int i = 0; i < 4; ++i) got = compiled(logits, weights);
    EXPECT_THAT(compiled.program_graph(), HasSubstr("tessera::fused"));
    const double tolerance = dtype == torch::kDouble ? 1e-12 : dtype == torch::kFloat ? 3e-5 : 0.02;
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(torch::allclose(got[i], wanted[i], tolerance, tolerance, /*equal_nan=*/true))
          << dtype << i << (got[i] - wanted[i]).abs().amax(1);
  }
}

TEST(RowsOfGraphs, LogSoftmaxOfSpecialRowsIsAtens) {
  expect_log_softmax_of_special_rows(torch::kCPU);
}

TEST(RowsOfGraphsOnCuda, LogSoftmaxOfSpecialRowsIsAtens) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  expect_log_softmax_of_special_rows(torch::kCUDA);
}

/// Autograd expands the gradient of the mean: Note [expanded numbers].
TEST(RowsOfGraphs, ANormByHandIsOneKernelEachWay) {
  const RowsOnHost on_host;
  const auto x = torch::randn({128, 64}).requires_grad_();
  const auto weight = torch::randn({64, 32});
  auto step = compile(
      [&] {
        x.mutable_grad() = Tensor();
        const auto y = x * (x.square().mean(-1, true) + 1e-6).rsqrt();
        const auto loss = y.mm(weight);
        loss.backward(torch::ones_like(loss));
        return loss.detach();
      },
      {.fullgraph = true});
  for (int i = 0; i < 3; ++i) step();
  const auto code = generated_code(step);
  const auto program = code.substr(code.find("\nprogram("));
  EXPECT_THAT(program, ::testing::Not(HasSubstr("aten.expand"))) << program;
  const std::string call = "\n  cpp_fused_";
  int kernels = 0;
  for (size_t at = 0; (at = program.find(call, at)) != std::string::npos; ++at) ++kernels;
  EXPECT_EQ(kernels, 2) << program;
}

/// What ATen computes of it alone keeps its layout.
TEST(RowsOfGraphs, ExpandedTransposesStayAsTheyAre) {
  const RowsOnHost on_host;
  const auto a = torch::randn({64, 32}), x = torch::randn({32, 64, 128});
  const auto function = [](const Tensor& small, const Tensor& large) {
    return small.t().unsqueeze(-1).expand({32, 64, 128}) * 2 + large;
  };
  auto step = compile(function, {.fullgraph = true});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::allclose(step(a, x), function(a, x)));
}

TEST(RowsOfGraphs, OutputsDoNotLieWhereACollectiveReads) {
  Graph graph = Graph::parse(R"(input %0: float32[64, 64] = argument "x"
%1: float32[64, 64] = aten::cumsum(%0, 1)
%2: float32[128, 64] = _c10d_functional::all_gather_into_tensor(%1, 2, "world")
%3: float32[64, 64] = aten::exp(%1)
%4: float32[64, 64] = aten::neg(%3)
%5: float32[128, 64] = _c10d_functional::wait_tensor(%2)
return %4
return %5
)");
  for (int i = 0; i < 6; ++i) graph.type(i).device = c10::Device(at::kCUDA, 0);
  fuse(graph);
  EXPECT_THAT(overwritable_inputs(graph), ::testing::Each(kNoValue)) << graph;
}

/// What linear_cross_entropy runs eagerly on a GPU.
TEST(RowsOfGraphs, LossesAndGradientsOfABlockAreOneKernel) {
  const RowsOnHost on_host;
  for (const char* dtype : {"float32", "bfloat16"}) {
    const bool is_low = std::string(dtype) == "bfloat16";
    const std::string logits = std::string(dtype) + "[96, 100]";
    Graph graph = Graph::parse(
        "input %0: " + logits + " = argument \"logits\"\n" +
        "input %1: int64[96] = argument \"target\"\n" +
        "input %2: float32[96] = argument \"scale\"\n" + "%3: float32[96, 1], %4: " + logits +
        " = tessera::cross_entropy_rows(%0, %1, %2, 7)\n" + "return %3\nreturn %4\n");
    torch::manual_seed(1);
    const auto given = (torch::randn({96, 100}) * 3).to(is_low ? torch::kBFloat16 : torch::kFloat);
    const auto target = torch::arange(96) % 50;
    const auto scale = torch::rand({96});
    const auto wanted = Program(graph, {}).run({given, target, scale});
    decompose(graph);
    fuse(graph);
    std::string why;
    auto kernels = load_kernels(write_kernels(graph), &why);
    ASSERT_TRUE(kernels) << why;
    EXPECT_EQ(std::ranges::count(graph.nodes, std::string(kFused), &Node::op), 1) << graph;
    const auto got = Program(graph, std::move(*kernels)).run({given, target, scale});
    EXPECT_TRUE(torch::allclose(got[0], wanted[0], 1e-5, 1e-5)) << dtype;
    EXPECT_TRUE(torch::allclose(got[1], wanted[1], is_low ? 0.02 : 1e-4, 1e-6)) << dtype;
    EXPECT_EQ(got[1].select(0, 7).abs().max().item<double>(), 0) << "an ignored target";
  }
}

/// Both gradients of a product read the one above it.
TEST(RowsOfGraphs, KernelsThatReadTheSameAreOne) {
  const RowsOnHost on_host;
  const auto gate = torch::randn({64, 64}).requires_grad_();
  const auto up = torch::randn({64, 64}).requires_grad_();
  const auto weight = torch::randn({64, 64});
  auto step = compile(
      [&] {
        gate.mutable_grad() = up.mutable_grad() = Tensor();
        const auto loss = (torch::silu(gate) * up).mm(weight).sum();
        loss.backward();
        return loss.detach();
      },
      {.fullgraph = true});
  for (int i = 0; i < 3; ++i) step();
  EXPECT_THAT(generated_code(step),
              ::testing::ContainsRegex("cpp_fused_[^\n]*silu_backward[^\n]*out [^\n]*, out "));
}

TEST(RowsOfGraphs, SumsOfIntegersAreAsTheyWere) {
  const RowsOnHost on_host;
  Steps steps;
  const ValueId x = steps.input(at::full({1024, 64}, 0.5));
  steps.result(steps.call("aten::sum.dim_IntList",
                          {Argument::of(x), number(std::vector<int64_t>{0}), number(false),
                           number(static_cast<int64_t>(at::kLong))}));
  decompose(steps.graph);
  EXPECT_EQ(steps.graph.nodes.at(0).op, "aten::sum.dim_IntList");
}

class Rows
    : public ::testing::TestWithParam<std::tuple<RowCase, torch::DeviceType, at::ScalarType>> {
 protected:
  torch::Device device() const { return std::get<1>(GetParam()); }
  void SetUp() override {
    if (device().is_cuda() && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
    setenv("TESSERA_CACHE", folder_.path().c_str(), 1);
  }
  void TearDown() override { unsetenv("TESSERA_CACHE"); }

  testing::TemporaryFolder folder_;
};

/// A step that leaves gradients of all that it is given.
Tensor step_of(Function function, const std::vector<Tensor>& given) {
  for (const auto& tensor : given) tensor.mutable_grad() = Tensor();
  const auto loss = function(given);
  loss.backward();
  return loss.detach();
}

std::vector<Tensor> leaves(const Shape& shape, const torch::TensorOptions& options) {
  torch::manual_seed(shape.rows + shape.columns);
  std::vector<Tensor> given = {
      torch::randn({shape.rows, shape.columns}, options),
      torch::randn({shape.rows, shape.columns}, options),
      torch::randn({shape.columns}, options),
      torch::randn({shape.columns}, options),
  };
  for (auto& tensor : given) tensor.requires_grad_();
  return given;
}

TEST_P(Rows, ComputeWhatOperatorsCompute) {
  const auto [each, kind, dtype] = GetParam();
  const bool is_low = std::string(each.name).ends_with("Low");
  const double tolerance = dtype == torch::kDouble ? 1e-11 : is_low ? 0.02 : 2e-4;
  const RowsOnHost on_host;
  for (const Shape& shape : kShapes) {
    if (!each.takes(shape)) continue;
    const auto given = leaves(shape, torch::dtype(dtype).device(kind));
    std::vector<Tensor> twins;
    for (const auto& tensor : given) twins.push_back(tensor.detach().clone().requires_grad_());
    const auto function = each.function;
    auto step = compile([&] { return step_of(function, given); }, {.fullgraph = true});
    for (int i = 0; i < 3; ++i) {
      const auto wanted = step_of(function, twins);
      const auto got = step();
      const std::string where = c10::str(each.name, " ", shape.rows, " x ", shape.columns);
      EXPECT_TRUE(torch::allclose(got, wanted, tolerance, tolerance))
          << where << " " << got.item<double>() << " " << wanted.item<double>();
      for (size_t k = 0; k < given.size(); ++k) {
        const auto scale = twins[k].grad().abs().max().item<double>();
        EXPECT_TRUE(torch::allclose(given[k].grad(), twins[k].grad(), tolerance,
                                    tolerance * std::max(scale, 1e-3)))
            << where << " gradient " << k << " of call " << i << ": "
            << (given[k].grad() - twins[k].grad()).abs().max().item<double>();
      }
    }
    // Few rows are not added up in parts.
    if (std::string(each.name) != "Biases" || shape.rows >= 1024) {
      EXPECT_THAT(generated_code(step),
                  ::testing::AnyOf(HasSubstr("across"), HasSubstr("column_sums")))
          << each.name << " " << shape.rows << " x " << shape.columns;
    }
  }
}

TEST_P(Rows, CompileForGpus) {
  const auto [each, kind, dtype] = GetParam();
  if (kind == torch::kCUDA) GTEST_SKIP() << "compiled by what runs there";
  std::string why;
  const auto* nvrtc = Nvrtc::find(&why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  const RowsOnHost on_host;
  for (const Shape& shape : kShapes) {
    if (!each.takes(shape)) continue;
    const auto given = leaves(shape, torch::dtype(dtype));
    const auto function = each.function;
    const testing::TemporaryFolder dumps;
    auto step = compile([&] { return step_of(function, given); },
                        {.fullgraph = true, .dump_folder = dumps.path()});
    for (int i = 0; i < 3; ++i) step();
    const auto text = kernels_for_gpus(dumped(dumps.path(), "decompose"));
    EXPECT_TRUE(nvrtc->compile(text, "sm_90", &why))
        << each.name << " " << shape.rows << " x " << shape.columns << ": " << why << text;
  }
}

/// Rows that shared memory holds, and such as it holds in part.
TEST(RowsOnCuda, LongOnesAreCrossEntropies) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  for (const int64_t classes : {50304, 110000, 151936}) {
    torch::manual_seed(classes);
    const auto options = torch::dtype(torch::kBFloat16).device(torch::kCUDA);
    const auto logits = (torch::randn({96, classes}, options) * 3).requires_grad_();
    const auto twin = logits.detach().clone().requires_grad_();
    const auto targets = torch::randint(classes, {96}, options.dtype(torch::kLong));
    targets.select(0, 5).fill_(-100);
    const auto loss_of = [&](const Tensor& given) {
      given.mutable_grad() = Tensor();
      const auto loss = F::cross_entropy(given.to(torch::kFloat), targets);
      loss.backward();
      return loss.detach();
    };
    auto step = compile([&] { return loss_of(logits); }, {.fullgraph = true});
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(torch::allclose(step(), loss_of(twin), 1e-4, 1e-4)) << classes;
      EXPECT_TRUE(torch::allclose(logits.grad(), twin.grad(), 0.02, 1e-7)) << classes;
    }
    EXPECT_THAT(generated_code(step), HasSubstr("across_block"));
  }
}

std::string name_of(const ::testing::TestParamInfo<Rows::ParamType>& info) {
  const auto& [each, kind, dtype] = info.param;
  return c10::str(each.name, kind == torch::kCPU ? "" : "OnCuda",
                  dtype == torch::kDouble ? "Double" : "Float");
}

INSTANTIATE_TEST_SUITE_P(Of, Rows,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(torch::kCPU, torch::kCUDA),
                                            ::testing::Values(torch::kFloat, torch::kDouble)),
                         name_of);

}  // namespace
}  // namespace tessera::compiler
