#include <tessera/comm.h>
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(CompileErrors, ABackendThatIsNotThere) {
  const auto function = [](torch::Tensor x) { return x * 2; };
  EXPECT_THAT(message_of<c10::ValueError>([&] { compile(function, {.backend = "inductor"}); }),
              HasSubstr("expected backend \"codegen\" or \"interpret\", got \"inductor\""));
  nn::Linear linear(2, 2);
  EXPECT_THAT(message_of<c10::ValueError>([&] { compile(linear, {.backend = ""}); }),
              HasSubstr("expected backend \"codegen\" or \"interpret\", got \"\""));
  const std::string name = "interpret";
  EXPECT_EQ(CompileOptions{.backend = name}.backend, CompileBackend::Interpret);
  EXPECT_EQ(CompileOptions{.backend = "codegen"}.backend, CompileBackend::Codegen);
  EXPECT_NO_THROW(compile(function, {.backend = CompileBackend::Interpret}));
}

TEST(CompileErrors, FullgraphNamesWhatStandsInTheWay) {
  auto reads =
      compile([](torch::Tensor x) { return x * x.sum().item<float>(); }, {.fullgraph = true});
  EXPECT_THAT(message_of<c10::Error>([&] { reads(torch::ones({2})); }),
              AllOf(HasSubstr("expected the function to be compiled as a whole (fullgraph)"),
                    HasSubstr("aten::_local_scalar_dense reads values on the host")));
  auto shapes = compile([](torch::Tensor x) { return x.nonzero(); }, {.fullgraph = true});
  EXPECT_THAT(message_of<c10::Error>([&] { shapes(torch::ones({2})); }),
              HasSubstr("aten::nonzero gives a result whose shape depends on values"));
  auto sparse =
      compile([](torch::Tensor x) { return x.to_sparse().to_dense(); }, {.fullgraph = true});
  EXPECT_THAT(message_of<c10::Error>([&] { sparse(torch::eye(2)); }),
              HasSubstr("compiled as a whole (fullgraph), but aten::"));
}

TEST(CompileErrors, StockAdamChangesNumbersAtEachStep) {
  auto weight = torch::ones({2}, torch::requires_grad());
  torch::optim::Adam adam({weight});
  auto step = compile(
      [&](torch::Tensor x) {
        adam.zero_grad();
        (weight * x).sum().backward();
        adam.step();
      },
      {.fullgraph = true});
  const auto message = message_of<c10::Error>([&] {
    for (int i = 0; i < 4; ++i) step(torch::ones({2}));
  });
  EXPECT_THAT(message, HasSubstr("compiled as a whole (fullgraph), but "));
}

TEST(CompileErrors, OptionsOfAWholeStepForAModule) {
  nn::Linear linear(2, 2);
  EXPECT_THAT(message_of<c10::ValueError>([&] { compile(linear, {.module = linear}); }),
              HasSubstr("belong to compile(function) over a whole step"));
}

TEST(CompileErrors, PassesWithoutAFunction) {
  const auto function = [](torch::Tensor x) { return x * 2; };
  EXPECT_THAT(message_of<c10::ValueError>([&] { compile(function, {.passes = {{"empty", {}}}}); }),
              HasSubstr("expected a function in Pass::run of the pass 'empty', got an empty one"));
  EXPECT_THAT(
      message_of<c10::ValueError>([&] { compile(function, {.disabled_passes = {"fusion"}}); }),
      HasSubstr("expected names of passes to disable, got 'fusion'"));
}

/// What calls of a function with this pass throw.
std::string message_with(const Pass& pass) {
  auto step = compile([](torch::Tensor x) { return x.exp() * 2; }, {.passes = {pass}});
  return message_of<c10::Error>([&] {
    for (int i = 0; i < 3; ++i) step(torch::ones({2}));
  });
}

TEST(CompileErrors, PassesThatBreakTheGraph) {
  const auto message = message_with({"breaker", [](Graph& graph) { graph.nodes.pop_back(); }});
  EXPECT_THAT(message, AllOf(HasSubstr("compile: the graph after breaker is not well-formed"),
                             HasSubstr("is used before it is defined"),
                             HasSubstr("correct the pass breaker")));
  EXPECT_THAT(message, Not(HasSubstr("report a bug")));
}

TEST(CompileErrors, PassesThatThrow) {
  EXPECT_THAT(message_with({"thrower", [](Graph&) { throw std::runtime_error("no such row"); }}),
              HasSubstr("compile: the pass thrower failed: no such row"));
}

TEST(CompileErrors, RanksThatDoNotMakeTheSameCompiledCalls) {
  run_processes(2, [] {
    nn::Linear net(2, 2);
    replicate(net);
    auto step = compile(
        [&](torch::Tensor x) {
          net->zero_grad();
          net(x).sum().backward();
        },
        {.module = net});
    for (int i = 0; i < 4; ++i) step(torch::ones({1, 2}));
    const auto message = message_of<c10::DistBackendError>([&] {
      if (rank() == 0)
        step(torch::ones({1, 2}));
      else
        all_reduce(torch::ones({3})).sum().item<float>();
    });
    if (rank() != 0) return;
    EXPECT_THAT(message, AllOf(HasSubstr("all_reduce"), HasSubstr("program "),
                               HasSubstr("make compiled calls of one kind on all ranks")));
  });
}

TEST(CompileErrors, ConfigPatches) {
  EXPECT_THAT(
      message_of<c10::ValueError>([] { ConfigPatch patch({.optimize_ddp = "fast"}); }),
      AllOf(HasSubstr("expected optimize_ddp to be one of python_reducer"), HasSubstr("'fast'")));
  EXPECT_THAT(message_of<c10::ValueError>([] { ConfigPatch patch({.bucket_bytes = 0}); }),
              HasSubstr("expected bucket_bytes above 0, got 0"));
  const auto message = message_of<c10::ValueError>(
      [] { ConfigPatch patch({.fuse_ddp_passes = {{"fuse_ddp_with_concat"}}}); });
  EXPECT_THAT(message, HasSubstr("fuse_ddp_with_concat_op"));
  EXPECT_EQ(compile_config(), CompileConfig()) << "a patch that is refused changes nothing";
}

TEST(CompileErrors, MemoryThatIsNotThereYet) {
  struct PeekerImpl : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x) {
      const auto y = x.exp();
      last = y.const_data_ptr<float>()[0];
      return y * 2;
    }
    float last = 0;
  };
  auto compiled = compile(std::make_shared<PeekerImpl>());
  compiled(torch::ones({2}));  // recorded as it runs
  EXPECT_THAT(message_of<c10::Error>([&] { compiled(torch::ones({2})); }),
              AnyOf(HasSubstr("was read while it was not computed yet"),
                    HasSubstr("its data is not allocated yet")));  // libtorch's, before 2.13
}

}  // namespace
}  // namespace tessera::testing
