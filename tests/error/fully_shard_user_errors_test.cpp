// What users do with sharded models, and what they are told. One test per error.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>
#include <tessera/state_dict.h>

#include "fully_shard/models.h"
#include "parallel/warnings.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FullyShardUserErrors : public ::testing::TestWithParam<std::string> {
 protected:
  /// `fresh`: units are numbered from 0.
  static void run(const RankBody& body, bool fresh = false) {
    run_processes(2, body, {.backend = GetParam(), .fresh = fresh});
  }
};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardUserErrors, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

at::Tensor input() { return torch::ones({2, 7}); }

TEST_P(FullyShardUserErrors, RanksWithOtherShapes) {
  run([] {
    Stack net(7 + 2 * rank());
    EXPECT_THAT(
        message_of<c10::Error>([&] { fully_shard(net); }),
        AllOf(HasSubstr("fully_shard: expected the same parameters on all ranks, but parameter 0 "
                        "is first.weight [7, 5]"),
              HasSubstr("and first.weight [9, 5]"), HasSubstr("on rank 1")));
    EXPECT_FALSE(is_dtensor(net->first->weight));
  });
}

TEST_P(FullyShardUserErrors, RanksWithOtherDtypes) {
  run([] {
    nn::Linear net(3, 2);
    if (rank() == 1) net->to(torch::kDouble);
    EXPECT_THAT(message_of<c10::Error>([&] { fully_shard(net); }),
                AllOf(HasSubstr("weight [2, 3] [3, 1] Float"), HasSubstr("[3, 1] Double")));
  });
}

TEST_P(FullyShardUserErrors, RanksWithOtherNumbersOfBlocks) {
  run([] {
    Stack net(7, 2 + rank());
    const auto shard = [&] {
      for (const auto& block : *net->blocks) fully_shard(block);
      fully_shard(net);
    };
    EXPECT_THAT(message_of<c10::Error>(shard),
                AllOf(HasSubstr("fully_shard: expected the same unit on all ranks, got "),
                      HasSubstr("StackImpl (strategy 0"), HasSubstr("BlockImpl (strategy 0")));
  });
}

TEST_P(FullyShardUserErrors, RanksThatShardInAnotherOrder) {
  run(
      [] {
        Stack net(7, 2);
        fully_shard(net->block(rank()));
        fully_shard(net->block(1 - rank()));
        fully_shard(net);
        EXPECT_THAT(message_of<c10::Error>([&] { net(torch::ones({1, 5})); }),
                    AllOf(HasSubstr("'blocks.0' ("), HasSubstr("unit 0"), HasSubstr("unit 1"),
                          HasSubstr("in the same order on all of them")));
      },
      /*fresh=*/true);
}

struct TableImpl : torch::nn::Module {
  TableImpl() {
    register_module("linear", linear);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)) * scale + mask; }
  nn::Linear linear{7, 7};
  nn::BatchNorm1d norm{7};
  at::Tensor scale = register_parameter("scale", torch::empty({7}));
  at::Tensor mask = register_buffer("mask", torch::empty({7}));
};
TESSERA_MODULE(Table);

Table without_memory() {
  const MetaInit no_memory;
  return Table();
}

TEST_P(FullyShardUserErrors, ModulesOfOnesOwnThatNobodyGivesValues) {
  run([] {
    auto net = without_memory();
    EXPECT_THAT(message_of([&] { fully_shard(net); }),
                AllOf(HasSubstr("TableImpl has parameters or buffers without memory"),
                      HasSubstr("'scale', 'mask'"), HasSubstr("pass param_init_fn")));
    auto other = without_memory();
    const auto fills_scale = [](torch::nn::Module& module) {
      if (auto* table = module.as<TableImpl>()) table->scale.data().fill_(2);
    };
    EXPECT_THAT(message_of([&] { fully_shard(other, {.param_init_fn = fills_scale}); }),
                HasSubstr("expected param_init_fn to give values to 'mask' of "));
  });
}

TEST_P(FullyShardUserErrors, ModulesOfTorchKeepTheirValuesBesideAFunctionForOthers) {
  run([] {
    auto net = without_memory();
    fully_shard(net, {.param_init_fn = [](torch::nn::Module& module) {
                  auto* table = module.as<TableImpl>();
                  if (table == nullptr) return;
                  table->scale.fill_(2);
                  table->mask.fill_(1);
                  table->linear->bias.fill_(3);
                }});
    EXPECT_TRUE(at::equal(whole(net->norm->weight), torch::ones({7})));
    EXPECT_TRUE(at::equal(net->norm->running_var, torch::ones({7})));
    EXPECT_GT(whole(net->linear->weight).abs().max().item<double>(), 0);
    EXPECT_FALSE(whole(net->linear->weight).isnan().any().item<bool>());
    EXPECT_TRUE(at::equal(whole(net->linear->bias), torch::full({7}, 3.0))) << "of its parent";
    EXPECT_TRUE(at::equal(net->mask, torch::ones({7})));
  });
}

TEST_P(FullyShardUserErrors, DtypesChangedAfterwards) {
  run([] {
    Block net;
    fully_shard(net);
    net->to(torch::kDouble);
    EXPECT_THAT(message_of<c10::Error>([&] { net(input().to(torch::kDouble)); }),
                AllOf(HasSubstr("fully_shard: expected parameter 'gain' of "), HasSubstr("Float"),
                      HasSubstr("other memory of Double"), HasSubstr("convert the module before")));
  });
}

TEST_P(FullyShardUserErrors, MemoryExchangedAfterwards) {
  run([] {
    nn::Linear net(7, 7);
    fully_shard(net);
    net(input());
    net->weight.set_data(torch::zeros_like(net->weight.detach()));
    EXPECT_THAT(message_of<c10::Error>([&] { net(input()); }),
                AllOf(HasSubstr("parameter 'weight' of "), HasSubstr("SummonFullParams")));
  });
}

struct EncoderImpl : torch::nn::Module {
  EncoderImpl() { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) { return fc(x); }
  at::Tensor encode(const at::Tensor& x) { return fc(x).tanh(); }
  nn::Linear fc{torch::nn::LinearOptions(7, 7).bias(false)};
};
TESSERA_MODULE(Encoder);

TEST_P(FullyShardUserErrors, PartsAndMethodsOfAUnit) {
  run([] {
    Encoder net;
    fully_shard(net);
    const auto text = AllOf(HasSubstr("got a mix of distributed and plain tensors"),
                            HasSubstr("the distributed one is parameter 'fc.weight' of "),
                            HasSubstr("EncoderImpl"), HasSubstr("call the module itself"),
                            HasSubstr("TESSERA_MODULE_METHOD"));
    EXPECT_THAT(message_of<c10::Error>([&] { net->encode(input()); }), text);
    EXPECT_THAT(message_of<c10::Error>([&] { net->fc(input()); }), text);
    EXPECT_THAT(message_of<c10::Error>([&] { static_cast<EncoderImpl&>(*net).forward(input()); }),
                text);
  });
}

TEST_P(FullyShardUserErrors, ModulesMadePastTheirHolder) {
  run([] {
    const auto net = std::make_shared<EncoderImpl>();
    EXPECT_THAT(message_of([&] { fully_shard(net); }),
                AllOf(HasSubstr("make it as Net net(...), not by std::make_shared<NetImpl>")));
  });
}

TEST_P(FullyShardUserErrors, OuterModulesFirst) {
  run([] {
    Stack net;
    fully_shard(net);
    EXPECT_THAT(message_of([&] { fully_shard(net->block(0)); }),
                HasSubstr("if one module contains the other, shard the inner one first"));
  });
}

TEST_P(FullyShardUserErrors, ParallelizedAfterwards) {
  run([] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 1}, {"dp", "tp"});
    Encoder net;
    fully_shard(net, {.mesh = mesh["dp"]});
    EXPECT_THAT(
        message_of([&] { parallelize_module(net, mesh["tp"], {{"fc", ColwiseParallel()}}); }),
        AllOf(HasSubstr("'fc.weight' not to be sharded yet"),
              HasSubstr("call parallelize_module first, then fully_shard")));
  });
}

TEST_P(FullyShardUserErrors, OptimizersThatHaveSteppedBefore) {
  run([] {
    nn::Linear net(7, 7);
    torch::optim::Adam optimizer(net->parameters());
    net(input()).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    fully_shard(net);
    net(input()).sum().backward();
    EXPECT_THAT(message_of<c10::Error>([&] { optimizer.step(); }),
                AllOf(HasSubstr("got a mix"), HasSubstr("made its states before parameters were "
                                                        "sharded")));
  });
}

TEST_P(FullyShardUserErrors, PoliciesThatNamePlainModules) {
  run([] {
    nn::TransformerEncoderLayer layer(torch::nn::TransformerEncoderLayerOptions(8, 2));
    nn::Sequential net(layer);
    EXPECT_THAT(
        message_of(
            [&] { fully_shard(net, {.policy = ModuleWrapPolicy::of<torch::nn::LinearImpl>()}); }),
        AllOf(HasSubstr("fully_shard: expected the policy to name modules whose calls can be "
                        "hooked, got '0."),
              HasSubstr("name the module around it")));
  });
}

TEST_P(FullyShardUserErrors, PoliciesThatNameNothing) {
  run([] {
    CaughtWarnings warnings;
    Stack net;
    fully_shard(net, {.policy = ModuleWrapPolicy::of<torch::nn::Conv2dImpl>()});
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_THAT(warnings.texts[0], AllOf(HasSubstr("the policy names no part of "),
                                         HasSubstr("StackImpl"), HasSubstr("one unit")));
    Stack other;
    fully_shard(other, {.policy = ModuleWrapPolicy::of<BlockImpl>()});
    EXPECT_EQ(warnings.texts.size(), 1U);
  });
}

TEST_P(FullyShardUserErrors, FunctionsOfReplicate) {
  run([] {
    Block net;
    fully_shard(net);
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { Join join(net); }),
                AllOf(HasSubstr("Join: expected a replicated module"), HasSubstr("fully sharded")));
    EXPECT_THAT(
        message_of<c10::NotImplementedError>([&] { register_comm_hook(*net, fp16_compress_hook); }),
        AllOf(HasSubstr("register_comm_hook: expected a replicated module"),
              HasSubstr("fully sharded")));
  });
}

TEST_P(FullyShardUserErrors, SavedByTorch) {
  run([] {
    Block net;
    fully_shard(net);
    EXPECT_THAT(message_of<c10::Error>([&] {
                  std::ostringstream out;
                  torch::save(net->up->weight, out);
                }),
                AllOf(HasSubstr("a DTensor has no memory"), HasSubstr("state_dict(module)"),
                      HasSubstr("optimizer_state_dict(module, optimizer)")));
  });
}

TEST_P(FullyShardUserErrors, Printed) {
  run([] {
    Block net;
    fully_shard(net);
    EXPECT_THAT(message_of<c10::Error>([&] {
                  std::ostringstream out;
                  out << net->up->weight;
                }),
                AllOf(HasSubstr("parameters of sharded modules are such tensors"),
                      HasSubstr("write std::cout << tessera::DTensor::of(tensor)")));
    std::ostringstream out;
    out << DTensor::of(net->up->weight);
    EXPECT_THAT(out.str(), AllOf(HasSubstr("[15, 7]"), HasSubstr("Shard"), HasSubstr("CPUFloat")));
  });
}

TEST_P(FullyShardUserErrors, WholeMatricesOfInit) {
  run([] {
    Block net;
    fully_shard(net);
    EXPECT_THAT(message_of<c10::Error>([&] { torch::nn::init::orthogonal_(net->up->weight); }),
                AllOf(HasSubstr("the target is parameter 'up.weight' of "
                                "tessera::testing::BlockImpl, which is sharded"),
                      HasSubstr("inside a SummonFullParams scope")));
    {
      const SummonFullParams whole(net);
      torch::manual_seed(3);
      torch::nn::init::orthogonal_(net->up->weight);
    }
    const auto weight = whole(net->up->weight);
    EXPECT_TRUE(torch::allclose(weight.t().mm(weight), torch::eye(7), 1e-4, 1e-5));
  });
}

TEST_P(FullyShardUserErrors, DictsOfRankZeroOnOthers) {
  run([] {
    Block net;
    fully_shard(net);
    if (rank() == 0) return;
    EXPECT_THAT(message_of<c10::Error>([&] { load_state_dict(net, StateDict()); }),
                AllOf(HasSubstr("the dict is empty on this rank"), HasSubstr("rank0_only")));
  });
}

TEST(FullyShardUserErrorsOnShm, ForwardsOfOneRankAlone) {
  run_processes(2,
                [] {
                  Stack net(7, 2);
                  for (const auto& block : *net->blocks) fully_shard(block);
                  fully_shard(net);
                  net(torch::ones({1, 5}));
                  all_reduce(torch::ones({3}));
                  if (rank() == 1) return;
                  EXPECT_THAT(
                      message_of<c10::Error>([&] { net->block(1)(input()); }),
                      AllOf(HasSubstr("fully_shard's wait"), HasSubstr("rank 1"),
                            HasSubstr("fully_shard: gathering the parameters of 'blocks.1' ("),
                            HasSubstr("every rank comes to each forward of it")));
                },
                {.backend = "shm", .timeout = std::chrono::seconds(2)});
}

}  // namespace
}  // namespace tessera::testing
