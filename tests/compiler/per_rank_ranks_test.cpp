// Under DataParallelSemantics::PerRank, the default, the batch-dimension analysis is in force: it
// checks batch dimensions, finds what mixes samples, and places what is returned.
#include "parallel/warnings.h"
#include "parallel_cases.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

void one_layer(PartsImpl& net) { net.parameter(torch::randn({2, 3}, real())); }

Tensors x_and_y(int64_t count) {
  const auto x = torch::randn({count, 3}, real());
  return {x, torch::randn({count, 2}, real())};
}

using Loss = std::function<Tensor(const Tensor&, const Tensor&)>;

ParallelCase with_loss(const Loss& loss) {
  return {"", one_layer,
          [loss](PartsImpl& net, const Tensors& given) -> Tensors {
            const auto out = given[0].mm(net.p[0].t());
            return {loss(out, given[1]), out};
          },
          x_and_y};
}

const Loss kPlain = [](const Tensor& out, const Tensor& y) { return torch::mse_loss(out, y); };

struct Told {
  std::string warnings, text;
};

/// Two calls of the step on these arguments.
Told tell(const ParallelCase& of, const Tensors& given, DataParallelOptions options = {}) {
  auto net = make_parts(of);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  auto compiled = compile(
      [](Parts& module, optim::SGD& opt, const Tensors& tensors) {
        return train_parts(module, opt, tensors);
      },
      {.parallel_mode = DataParallel("replicate", std::move(options)), .backend = "interpret"});
  const CaughtWarnings warnings;
  compiled(net, optimizer, given);
  compiled(net, optimizer, given);
  return {warnings.text(), explain(compiled)};
}

class PerRankRanks : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Of, PerRankRanks,
                         ::testing::ValuesIn(device_cases(torch::kCPU, {"shm"}, {2})),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, PerRankRanks, ::testing::ValuesIn(cuda_backends()), backend_name);

struct Mixing {
  const char* op;
  const char* each_rank;
  Loss loss;
};

TEST_P(PerRankRanks, TellsWhatMixesSamples) {
  const std::vector<Mixing> all = {
      {"aten::_softmax", "shares among its own samples",
       [](auto out, auto y) { return torch::mse_loss(out.softmax(0), y); }},
      {"aten::_log_softmax", "shares among its own samples",  // twice, told once
       [](auto out, auto y) {
         return torch::mse_loss(out.log_softmax(0) + (out * 2).log_softmax(0), y);
       }},
      {"aten::sort", "an order of its own samples",
       [](auto out, auto y) { return torch::mse_loss(std::get<0>(out.sort(0)), y); }},
      {"aten::mm", "pairs of its own samples",
       [](auto out, auto /*y*/) { return out.mm(out.t()).logsumexp(1).mean(); }},
      {"aten::div.Tensor", "a quotient of its own sums",
       [](auto out, auto y) {
         const auto mask = (y > 0).to(torch::kDouble);
         return (out * mask).sum() / mask.sum();
       }},
      {"aten::native_batch_norm", "statistics of its own samples",
       [](auto out, auto y) {
         return torch::mse_loss(torch::batch_norm(out, {}, {}, {}, {}, true, 0.1, 1e-5, false), y);
       }},
      {"aten::sqrt", "it of the sum over its own samples",
       [](auto out, auto y) { return torch::mse_loss(out, y).sqrt(); }},
      {"aten::add.Scalar", "it of the sum over its own samples",
       [](auto out, auto /*y*/) { return out.sum() + 1.0; }},
  };
  run(2, [&] {
    for (const auto& [op, each_rank, loss] : all) {
      const auto told = tell(with_loss(loss), x_and_y(4));
      const auto line =
          "DataParallel: " + std::string(op) + " mixes samples: each rank computes " + each_rank;
      EXPECT_THAT(told.text, HasSubstr(line));
      EXPECT_THAT(told.warnings, HasSubstr(line));
      // Once: not at each call, and not for its backward.
      const auto first = told.warnings.find("mixes samples");
      EXPECT_EQ(told.warnings.find("mixes samples", first + 1), std::string::npos) << told.warnings;
      EXPECT_THAT([&] { tell(with_loss(loss), x_and_y(4), {.on_mix = OnMix::Error}); },
                  ThrowsMessage<c10::ValueError>(
                      AllOf(HasSubstr("(on_mix = Error), got "), HasSubstr(op))));
    }
    const auto plain = tell(with_loss(kPlain), x_and_y(4), {.on_mix = OnMix::Error});
    EXPECT_THAT(plain.text, Not(HasSubstr("mixes samples")));
    EXPECT_THAT(plain.warnings, Not(HasSubstr("mixes samples")));
  });
}

/// Constants beside a mean, and writes of a part of each sample.
TEST_P(PerRankRanks, TellsNothingOfSamplesThatStayApart) {
  const std::vector<Loss> all = {
      [](auto out, auto y) { return torch::mse_loss(out, y) + 2.0; },
      [](auto out, auto y) { return 1.0 - torch::mse_loss(out, y) * 0.1 - 0.5; },
      [](auto out, auto y) { return torch::mse_loss(out, y).add_(1.0).sub_(0.25); },
      [](auto out, auto y) {
        const auto written = out.clone();
        written.narrow(1, 0, 1).mul_(2.0);
        written.select(1, 1).copy_(y.select(1, 0));
        written.narrow(0, 0, 2).zero_();
        return torch::mse_loss(written, y);
      },
      [](auto out, auto y) {
        auto joined = torch::zeros({out.size(0), 4}, real());
        joined.narrow(1, 0, 2).copy_(out);
        joined.narrow(1, 2, 2).copy_(y);
        return joined.pow(2).mean();
      },
  };
  run(2, [&] {
    for (const auto& loss : all) {
      const auto told = tell(with_loss(loss), x_and_y(4), {.on_mix = OnMix::Error});
      EXPECT_THAT(told.text, Not(HasSubstr("mixes samples")));
    }
  });
}

void attention_layer(PartsImpl& net) {
  net.parameter(torch::randn({12, 4}, real()));
  net.parameter(torch::randn({12}, real()));
  net.parameter(torch::randn({4, 4}, real()));
  net.parameter(torch::randn({4}, real()));
  net.parameter(torch::randn({8, 1, 4}, real()));  // of positions
}

/// Of [positions, batch, width], by libtorch.
Tensor attend(PartsImpl& net, const Tensor& x) {
  torch::nn::functional::MultiheadAttentionForwardFuncOptions options(
      4, 2, net.p[0], net.p[1], {}, {}, false, 0.0, net.p[2], net.p[3]);
  options.attn_mask(torch::ones({x.size(0), x.size(0)}, real()).triu(1) * -1e9);
  const auto padding = torch::zeros({x.size(1), x.size(0)}, integer()).to(torch::kBool);
  options.key_padding_mask(padding);
  return std::get<0>(torch::nn::functional::multi_head_attention_forward(x, x, x, options));
}

/// The same by hand, with heads inside of the batch or outside of it.
Tensor attend_by_hand(PartsImpl& net, const Tensor& x, bool heads_inside) {
  const auto length = x.size(0), batch = x.size(1);
  const auto parts = torch::linear(x, net.p[0], net.p[1]).chunk(3, 2);
  const std::vector<int64_t> order = {heads_inside ? 1 : 2, heads_inside ? 2 : 1, 0, 3};
  const auto heads = [&](const Tensor& of) {
    return of.reshape({length, batch, 2, 2}).permute(order).reshape({2 * batch, length, 2});
  };
  const auto mask = torch::ones({length, length}, real()).triu(1) * -1e9;
  const auto scores = heads(parts[0]).bmm(heads(parts[1]).transpose(1, 2)) + mask;
  const auto out = scores.softmax(-1).bmm(heads(parts[2]));
  const std::vector<int64_t> back = {2, heads_inside ? 0 : 1, heads_inside ? 1 : 0, 3};
  const auto split =
      heads_inside ? out.view({batch, 2, length, 2}) : out.view({2, batch, length, 2});
  return torch::linear(split.permute(back).reshape({length, batch, 4}), net.p[2], net.p[3]);
}

TEST_P(PerRankRanks, TakesAttentionWithTheBatchInDimensionOne) {
  const std::vector<std::function<Tensor(PartsImpl&, const Tensor&)>> ways = {
      attend, [](auto& net, const auto& x) { return attend_by_hand(net, x, true); },
      [](auto& net, const auto& x) { return attend_by_hand(net, x, false); }};
  const auto expect_apart = [&](int64_t length, int64_t batch, size_t way) {
    const ParallelCase of{"",
                          attention_layer,
                          [&](PartsImpl& net, const Tensors& given) -> Tensors {
                            const auto x = given[0] + net.p[4].narrow(0, 0, given[0].size(0));
                            const auto out = ways[way](net, x) + x;
                            return {torch::mse_loss(out, given[1]), out};
                          },
                          {}};
    const auto x = torch::randn({length, batch, 4}, real()), y = torch::randn_like(x);
    const auto told = tell(of, {x, y}, {.input_batch_dim = 1, .on_mix = OnMix::Error});
    EXPECT_THAT(told.text, Not(HasSubstr("mixes samples")));
  };
  run(2, [&] {
    for (const int64_t length : {1, 2, 3, 5}) {
      for (const int64_t batch : {1, 2, 5}) {  // one sample leaves no trace in the sizes of views
        for (size_t way = 0; way < ways.size(); ++way) {
          SCOPED_TRACE(c10::str("way ", way, ", ", length, " positions, ", batch, " samples"));
          expect_apart(length, batch, way);
        }
      }
    }
  });
}

/// By the same step on more samples, which is undone; where that fails, nothing is claimed.
TEST_P(PerRankRanks, TellsWhatWouldMixMoreThanOneSample) {
  run(2, [] {
    const auto mixing = with_loss(
        [](const Tensor& out, const Tensor& y) { return torch::mse_loss(out.softmax(0), y); });
    const auto told = tell(mixing, x_and_y(1));
    EXPECT_THAT(told.warnings, HasSubstr("aten::_softmax mixes samples"));
    EXPECT_THAT([&] { tell(mixing, x_and_y(1), {.on_mix = OnMix::Error}); },
                ThrowsMessage<c10::ValueError>(HasSubstr("got aten::_softmax")));
    EXPECT_THAT(tell(with_loss(kPlain), x_and_y(1), {.on_mix = OnMix::Error}).text,
                Not(HasSubstr("mixes samples")));
    const auto of_one = with_loss([](const Tensor& out, const Tensor& y) {
      return torch::mse_loss(out.view({2}), y.view({2}));
    });
    const auto unknown = tell(of_one, x_and_y(1));
    EXPECT_THAT(unknown.text, HasSubstr("it can't be told whether samples are mixed"));
    EXPECT_THAT(unknown.warnings, Not(HasSubstr("mixes samples")));
    EXPECT_THAT([&] { tell(of_one, x_and_y(1), {.on_mix = OnMix::Error}); },
                ThrowsMessage<c10::ValueError>(HasSubstr("takes any number of samples")));
  });
}

TEST_P(PerRankRanks, ReturnsDistributedTensorsOfOneSample) {
  run(2, [] {
    auto net = make_parts(with_loss(kPlain));
    auto compiled = compile(
        [](Parts& module, const Tensor& x) -> Tensors {
          const torch::NoGradGuard no_grad;
          const auto out = x.mm(module->p[0].t());
          return {out, out.t().clone(), out.view({1, -1, 2}).clone(), out.mean(),
                  out.squeeze().clone()};
        },
        {.parallel_mode = DataParallel(DataParallelStyle::Replicate, {.returns_dtensors = true}),
         .backend = "interpret"});
    const auto weight = net->p[0].detach().clone();
    torch::manual_seed(2);
    const auto whole = torch::rand({2, 3}, real());
    const auto results = compiled(net, whole.narrow(0, rank(), 1));
    const auto out = whole.mm(weight.t());
    const std::vector<std::pair<Placement, Tensor>> wanted = {{Shard(0), out},
                                                              {Shard(1), out.t()},
                                                              {Shard(1), out.view({1, 2, 2})},
                                                              {Partial("avg"), out.mean()}};
    for (size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_TRUE(is_dtensor(results[i])) << i;
      EXPECT_EQ(DTensor::of(results[i]).placements(), Placements{wanted[i].first}) << i;
      expect_near(DTensor::of(results[i]).full_tensor(), wanted[i].second, "result");
    }
    // Of other sizes than those of several samples would be.
    EXPECT_FALSE(is_dtensor(results[4]));
    expect_near(results[4], out[rank()], "squeezed");
  });
}

TEST_P(PerRankRanks, TellsOfTargetsThatAreLeftOut) {
  const auto entropy =
      with_loss([](auto out, auto y) { return torch::nn::functional::cross_entropy(out, y); });
  const auto weighted = with_loss([](auto out, auto y) {
    return torch::nn::functional::cross_entropy(
        out, y,
        torch::nn::functional::CrossEntropyFuncOptions().weight(torch::tensor({0.5, 2.0}, real())));
  });
  run(2, [&] {
    const auto x = torch::randn({4, 3}, real());
    const auto all = torch::tensor({0, 1, 1, 0}, integer()),
               some = torch::tensor({0, 1, -100, 0}, integer());
    const auto with_all = tell(entropy, {x, all}), with_some = tell(entropy, {x, some});
    EXPECT_THAT(with_all.text,
                HasSubstr("aten::nll_loss_forward mixes samples where targets are -100"));
    EXPECT_THAT(with_all.warnings, Not(HasSubstr("nll_loss")));
    EXPECT_THAT(with_some.warnings,
                HasSubstr("each rank computes a mean weighted by its own targets"));
    EXPECT_THAT(tell(weighted, {x, all}).warnings, HasSubstr("aten::nll_loss_forward mixes"));
  });
}

TEST_P(PerRankRanks, TakesArgumentsWithoutABatch) {
  run(2, [] {
    const ParallelCase of{"",
                          one_layer,
                          [](PartsImpl& net, const Tensors& given) -> Tensors {
                            const auto out = given[0].t().mm(net.p[0].t()) * given[1];
                            return {out.pow(2).mean() * given[2], out};
                          },
                          {}};
    const auto told =
        tell(of, {torch::randn({3, 4}, real()), torch::ones({2}, real()), torch::ones({}, real())},
             {.input_batch_dims = {1, std::nullopt, std::nullopt}, .on_mix = OnMix::Error});
    EXPECT_THAT(told.text, Not(HasSubstr("mixes samples")));
  });
}

TEST_P(PerRankRanks, ReturnsDistributedTensors) {
  run(2, [] {
    auto net = make_parts(with_loss(kPlain));
    auto compiled = compile(
        [](Parts& module, const Tensor& x) -> Tensors {
          const torch::NoGradGuard no_grad;
          const auto out = x.t().mm(module->p[0].t());
          const auto weights = std::get<1>(torch::nll_loss_forward(
              out, torch::zeros({out.size(0)}, integer()), {}, at::Reduction::Mean, -100));
          return {out,
                  out.t().clone(),
                  out.mean(),
                  out.sum(),
                  module->p[0].exp(),
                  std::get<0>(out.sum(1).sort(0)).sum(0).sqrt(),
                  x.exp().reshape({-1}),
                  weights};
        },
        {.parallel_mode =
             DataParallel("replicate", {.input_batch_dim = 1, .returns_dtensors = true}),
         .backend = "interpret"});
    const auto weight = net->p[0].detach().clone();
    torch::manual_seed(2);
    const auto whole = torch::rand({3, 8}, real());
    const auto results = compiled(net, whole.narrow(1, 4 * rank(), 4));
    const auto out = whole.t().mm(weight.t());
    const std::vector<std::pair<Placement, Tensor>> wanted = {{Shard(0), out},
                                                              {Shard(1), out.t()},
                                                              {Partial("avg"), out.mean()},
                                                              {Partial(), out.sum()},
                                                              {Replicate(), weight.exp()}};
    for (size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_TRUE(is_dtensor(results[i])) << i;
      EXPECT_EQ(DTensor::of(results[i]).placements(), Placements{wanted[i].first}) << i;
      expect_near(DTensor::of(results[i]).full_tensor(), wanted[i].second, "result");
    }
    for (const size_t i : {5, 6, 7}) {  // mixed, each rank's not in one place, of its own targets
      EXPECT_FALSE(is_dtensor(results[i])) << i;
      EXPECT_THAT(explain(compiled), HasSubstr(c10::str("result ", i, " has no placement")));
    }
  });
}

TEST(PerRankErrorsRanks, NameTheInputWithAWrongBatchDimension) {
  run_processes(2, [] {
    const auto given = x_and_y(4);
    const auto of = with_loss(kPlain);
    EXPECT_THAT([&] { tell(of, given, {.input_batch_dim = 1}); },
                ThrowsMessage<c10::ValueError>(HasSubstr(
                    "DataParallel: expected 3 samples in argument 1, as in argument 0, got 2 "
                    "along dimension 1 of its sizes [4, 2]; give another input_batch_dim")));
    EXPECT_THAT([&] { tell(of, given, {.input_batch_dim = 2}); },
                ThrowsMessage<c10::ValueError>(
                    HasSubstr("expected tensors with a batch dimension 2, but argument 0 has "
                              "sizes [4, 3]")));
    EXPECT_THAT([&] { tell(of, given, {.input_batch_dims = {0}}); },
                ThrowsMessage<c10::ValueError>(HasSubstr("and none for argument 1")));
    // One that a parameter determines.
    EXPECT_THAT(
        [&] { tell(of, given, {.input_batch_dims = {1, std::nullopt}}); },
        ThrowsMessage<c10::ValueError>(AllOf(
            HasSubstr("DataParallel: expected the batch of argument 0 along dimension 1 of its "
                      "sizes [4, 3], but aten::mm matches that dimension with one of p0"),
            HasSubstr("input_batch_dims for each tensor"))));
    // The same beside a bias.
    const ParallelCase biased{"",
                              [](PartsImpl& net) {
                                one_layer(net);
                                net.parameter(torch::randn({2}, real()));
                              },
                              [](PartsImpl& net, const Tensors& args) -> Tensors {
                                const auto out = torch::linear(args[0], net.p[0], net.p[1]);
                                return {torch::mse_loss(out, args[1]), out};
                              },
                              x_and_y};
    EXPECT_THAT([&] { tell(biased, given, {.input_batch_dims = {1, std::nullopt}}); },
                ThrowsMessage<c10::ValueError>(
                    HasSubstr("but aten::addmm matches that dimension with one of p0")));
    // The same in a batch of one.
    const ParallelCase narrow{
        "", [](PartsImpl& net) { net.parameter(torch::randn({2, 1}, real())); }, of.forward, {}};
    EXPECT_THAT(
        [&] {
          tell(narrow, {torch::randn({4, 1}, real()), torch::randn({4, 2}, real())},
               {.input_batch_dims = {1, std::nullopt}});
        },
        ThrowsMessage<c10::ValueError>(
            HasSubstr("DataParallel: expected the batch of argument 0 along dimension 1 of its "
                      "sizes [4, 1], but aten::mm matches that dimension with one of p0")));
    EXPECT_THAT([&] { tell(of, {given[0], torch::ones({}, real())}); },
                ThrowsMessage<c10::ValueError>(
                    HasSubstr("but argument 1 has sizes []; give another input_batch_dim, or "
                              "input_batch_dims with none for it")));
  });
}

}  // namespace
}  // namespace tessera::testing
