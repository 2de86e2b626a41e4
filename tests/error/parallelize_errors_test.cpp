#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Two of four ranks' worth of checks need no other ranks.
class ParallelizeErrors : public ::testing::Test {
 protected:
  const FakeWorld world_{0, 4};
  const DeviceMesh mesh_ = mesh_of_all();
};

struct HalfPlainImpl : torch::nn::Module {
  torch::nn::Linear up{register_module("up", torch::nn::Linear(4, 4))};
  at::Tensor forward(const at::Tensor& x) { return up(x); }
};
TESSERA_MODULE(HalfPlain);

TEST_F(ParallelizeErrors, ModulesThatCantBeHooked) {
  HalfPlain net;
  EXPECT_THAT(message_of([&] { parallelize_module(net, mesh_, {{"up", ColwiseParallel()}}); }),
              AllOf(HasSubstr("parallelize_module: ColwiseParallel expected 'up' "
                              "(torch::nn::LinearImpl) to be a module whose calls can be hooked"),
                    HasSubstr("tessera::nn::Linear"), HasSubstr("TESSERA_MODULE")));
  EXPECT_FALSE(is_dtensor(net->up->weight)) << "nothing has happened";
  const auto prepare =
      PrepareModuleInput({.input_layouts = Shard(0), .desired_input_layouts = Replicate()});
  EXPECT_THAT(message_of([&] { parallelize_module(net, mesh_, {{"up", prepare}}); }),
              HasSubstr("PrepareModuleInput expected 'up'"));
}

TEST_F(ParallelizeErrors, NoMeshInForce) {
  MlpModule net;
  EXPECT_THAT(
      message_of<c10::ValueError>([&] { parallelize_module(net, {{"net1", ColwiseParallel()}}); }),
      HasSubstr("parallelize_module: expected a mesh, or a MeshScope around the call"));
}

TEST_F(ParallelizeErrors, UnsupportedModules) {
  MlpModule net;
  EXPECT_THAT(message_of<c10::NotImplementedError>(
                  [&] { parallelize_module(net, mesh_, {{"*", ColwiseParallel()}}); }),
              AllOf(HasSubstr("ColwiseParallel expected a Linear or an Embedding, got 'relu' ("),
                    HasSubstr("ReLUImpl)")));
  EXPECT_THAT(
      message_of<c10::NotImplementedError>(
          [&] { parallelize_module(net, mesh_, RowwiseParallel()); }),
      HasSubstr("RowwiseParallel expected a Linear or an Embedding, got the module itself"));
  nn::Embedding table(torch::nn::EmbeddingOptions(8, 4).max_norm(1.0));
  EXPECT_THAT(message_of<c10::NotImplementedError>(
                  [&] { parallelize_module(table, mesh_, RowwiseParallel()); }),
              HasSubstr("neither max_norm nor sparse gradients"));
}

TEST_F(ParallelizeErrors, HeadsThatCantBeSplit) {
  nn::Sequential net;
  net->push_back("qkv", nn::Linear(6, 36));
  const auto expect = [&](ColwiseParallelOptions options, const std::string& text) {
    EXPECT_THAT(
        message_of([&] { parallelize_module(net, mesh_, {{"qkv", ColwiseParallel(options)}}); }),
        AllOf(HasSubstr("'qkv' (torch::nn::LinearImpl)"), HasSubstr(text)));
    EXPECT_FALSE(is_dtensor(get_parameter(net, "qkv.weight")));
  };
  expect({.heads = 6}, "expected the 6 heads of");
  expect({.heads = 5}, "to be 5 heads of equal size");
  expect({.heads = 6, .packed = 3}, "to be divisible by the 4 ranks");
  expect({.packed = 5}, "to be 5 equal parts");
  expect({.packed = 6}, "expected each of the 6 packed parts");
  expect({.heads = -1}, "expected heads >= 0");
  EXPECT_THAT(
      message_of([&] { parallelize_module(net, mesh_, {{"qkv", RowwiseParallel({.heads = 6})}}); }),
      HasSubstr("expected the 6 heads of 'qkv'"));
}

TEST_F(ParallelizeErrors, AppliedTwice) {
  MlpModule net;
  parallelize_module(net, mesh_, {{"net1", ColwiseParallel()}});
  EXPECT_THAT(message_of([&] { parallelize_module(net, mesh_, {{"net*", RowwiseParallel()}}); }),
              AllOf(HasSubstr("expected 'net1'"),
                    HasSubstr("to be parallelized once, but ColwiseParallel is applied to it "
                              "already and RowwiseParallel came")));
  nn::Linear other(4, 4);
  distribute_module(*other, mesh_);
  EXPECT_THAT(message_of([&] { parallelize_module(other, mesh_, ColwiseParallel()); }),
              HasSubstr("Cannot apply parallelize_module"));
}

struct SharedHeadImpl : torch::nn::Module {
  SharedHeadImpl() { head->weight = words->weight; }
  nn::Embedding words{register_module("words", nn::Embedding(8, 8))};
  nn::Linear head{register_module("head", nn::Linear(8, 8))};
};

TEST_F(ParallelizeErrors, SharedParametersPlacedDifferently) {
  const auto net = std::make_shared<SharedHeadImpl>();
  EXPECT_THAT(message_of([&] {
                parallelize_module(net, mesh_,
                                   {{"words", ColwiseParallel()}, {"head", ColwiseParallel()}});
              }),
              AllOf(HasSubstr("ColwiseParallel expected 'head.weight' to be Shard(0)"),
                    HasSubstr("it is distributed already, as"), HasSubstr("Shard(1)")));
  const auto packed = std::make_shared<SharedHeadImpl>();
  EXPECT_THAT(message_of([&] {
                parallelize_module(
                    packed, mesh_,
                    {{"head", ColwiseParallel({.packed = 2})}, {"words", RowwiseParallel()}});
              }),
              HasSubstr("expected 'words.weight' to have its rows packed in 1 parts"));
}

TEST_F(ParallelizeErrors, LayoutsThatDoNotFitTogether) {
  EXPECT_THAT(message_of([] { PrepareModuleInput({.input_layouts = Shard(0)}); }),
              HasSubstr("PrepareModuleInput: expected desired_input_layouts beside input_layouts"));
  EXPECT_THAT(message_of([] {
                PrepareModuleInput(
                    {.input_layouts = {Shard(0), Shard(1)}, .desired_input_layouts = Replicate()});
              }),
              HasSubstr("of the same length, got 2 and 1"));
  EXPECT_THAT(message_of([] {
                PrepareModuleInput({.input_kwarg_layouts = {{"a", Shard(0)}},
                                    .desired_input_kwarg_layouts = {{"b", Shard(0)}}});
              }),
              HasSubstr("expected desired_input_kwarg_layouts to name 'a'"));
  EXPECT_THAT(message_of([] { PrepareModuleOutput({.output_layouts = Shard(0)}); }),
              HasSubstr("expected desired_output_layouts beside output_layouts"));
  EXPECT_THAT(message_of([] { PrepareModuleOutput({}); }),
              HasSubstr("expected output_layouts and desired_output_layouts, got none"));
}

struct RepeatedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, int64_t n) { return x * n; }
};
TESSERA_MODULE(Repeated, "x", "n");

TEST_F(ParallelizeErrors, CallsThatDoNotFitTheLayouts) {
  const auto prepared = [&](PrepareModuleInputOptions options) {
    nn::Sequential net;
    Repeated counting;
    net->push_back("counting", counting);
    parallelize_module(net, mesh_, {{"counting", PrepareModuleInput(std::move(options))}});
    return counting;
  };
  const auto x = torch::ones({2, 2});
  EXPECT_THAT(message_of([&] {
                prepared({.input_layouts = Shard(0), .desired_input_layouts = Replicate()})(x, 2);
              }),
              AllOf(HasSubstr("PrepareModuleInput: expected a call of 'counting'"),
                    HasSubstr("with 1 arguments, as many as there are input_layouts, got 2")));
  EXPECT_THAT(message_of([&] {
                prepared({.input_layouts = {std::nullopt, Shard(0)},
                          .desired_input_layouts = {std::nullopt, Shard(0)}})(x, 2);
              }),
              HasSubstr("expected argument 1 of 'counting'"));
  EXPECT_THAT(message_of([&] {
                prepared({.input_kwarg_layouts = {{"mask", Shard(0)}},
                          .desired_input_kwarg_layouts = {{"mask", Shard(0)}}})(x, 2);
              }),
              AllOf(HasSubstr("to have a parameter 'mask'"), HasSubstr("'x' and 'n'")));
  Dummy dummy;
  parallelize_module(dummy, mesh_,
                     PrepareModuleOutput({.output_layouts = {Shard(0), Shard(0)},
                                          .desired_output_layouts = {Shard(0), Shard(0)}}));
  EXPECT_THAT(message_of([&] { dummy(x); }),
              HasSubstr("to return 2 tensors, as many as there are output_layouts, got 1"));
}

TEST_F(ParallelizeErrors, InputsOfAnotherWidthOrMesh) {
  nn::Linear net(8, 4);
  parallelize_module(net, mesh_, RowwiseParallel());
  EXPECT_THAT(message_of([&] { net(torch::ones({3, 8})); }),
              AllOf(HasSubstr("RowwiseParallel: expected the input of the module itself"),
                    HasSubstr("this rank's 2 of 8 features"),
                    HasSubstr("pass .input_layouts = Replicate()")));
  const auto other = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"})["tp"];
  const auto x = DTensor::from_local(torch::ones({3, 8}), other);
  EXPECT_THAT(message_of([&] { net(x); }),
              AllOf(HasSubstr("RowwiseParallel: expected tensors on DeviceMesh(cpu"),
                    HasSubstr("got one on")));
}

TEST_F(ParallelizeErrors, PlansAndTheirMesh) {
  MlpModule net;
  EXPECT_THAT(
      message_of<c10::TypeError>([&] { parallelize_module(net, mesh_, {{"net1", nullptr}}); }),
      HasSubstr("parallelize_module: expected a ParallelStyle for plan entry 'net1'"));
  const auto mesh2 = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  EXPECT_THAT(message_of([&] { parallelize_module(net, mesh2, {{"net1", ColwiseParallel()}}); }),
              AllOf(HasSubstr("parallelize_module: expected a 1-D mesh for"),
                    HasSubstr("MlpModuleImpl, got 2-D"), HasSubstr("mesh[\"tp\"]")));
  EXPECT_THAT(
      message_of([&] { parallelize_module(net, mesh_, ColwiseParallel(), {.src_data_rank = 4}); }),
      HasSubstr("expected a src_data_rank from 0 to 3"));
  EXPECT_FALSE(is_dtensor(net->net1->weight)) << "nothing has happened";
}

struct PairImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x, x}; }
};
TESSERA_MODULE(Pair);

TEST_F(ParallelizeErrors, SeveralResultsWhereOneIsExpected) {
  Pair pair;
  parallelize_module(pair, mesh_, SequenceParallel({.use_local_output = true}));
  EXPECT_THAT(
      message_of([&] { pair(DTensor::from_local(torch::ones({1, 2, 3}), mesh_, {Shard(1)})); }),
      AllOf(HasSubstr("SequenceParallel: expected the module itself ("),
            HasSubstr("to return one tensor, got something else")));
}

TEST(LossParallelErrors, TargetsOutOfBounds) {
  run_processes(2, [] {
    const auto logits = distribute_tensor(torch::rand({4, 10}), mesh_of_all(), {Shard(1)});
    const auto target = torch::tensor({1, 2, 10, 3}, torch::kLong);
    const loss_parallel scope;
    EXPECT_THAT(
        message_of<c10::IndexError>([&] { torch::nn::functional::cross_entropy(logits, target); }),
        HasSubstr("cross_entropy: expected targets from 0 to 9"));
  });
}

TEST_F(ParallelizeErrors, RowsThatCantBePacked) {
  EXPECT_THAT(message_of([] { pack_rows(torch::ones({10, 2}), 3, 2); }),
              HasSubstr("pack_rows: expected rows that 3 parts and 2 ranks divide evenly"));
}

}  // namespace
}  // namespace tessera::testing
