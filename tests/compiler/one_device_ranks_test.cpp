// Under DataParallelSemantics::OneDevice all ranks together compute what one process does on the
// whole batch, in float64 to 1e-12.
#include "parallel_cases.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

#include <numeric>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

struct Way {
  std::string style = "replicate";
  bool adam = false;
  std::string backend = "interpret";
};

/// Steps with these parts of the batch, by step and rank.
using Lengths = std::vector<std::vector<int64_t>>;

struct Twins {
  explicit Twins(const ParallelCase& of, const Way& way)
      : net(make_parts(of)),
        reference(make_parts(of)),
        optimizer(optimizer_for(net, way.adam)),
        reference_optimizer(optimizer_for(reference, way.adam)) {}
  Parts net, reference;
  std::unique_ptr<torch::optim::Optimizer> optimizer, reference_optimizer;
};

void expect_equal_state(Twins& twins, const std::string& what) {
  for (size_t k = 0; k < twins.net->p.size(); ++k) {
    const auto name = what + ", parameter " + std::to_string(k);
    expect_near(gathered(twins.net->p[k]), twins.reference->p[k].detach(), name);
    expect_near(gathered(twins.net->p[k].grad()), twins.reference->p[k].grad(), name + ".grad");
  }
  for (size_t k = 0; k < twins.net->b.size(); ++k)
    expect_near(twins.net->b[k], twins.reference->b[k], what + ", buffer " + std::to_string(k));
}

std::string expect_as_one_device(const ParallelCase& of, const Way& way, const Lengths& lengths,
                                 DataParallelOptions options = {}) {
  const auto title = of.name + ", " + way.style + ", " + way.backend;
  SCOPED_TRACE(title);
  Twins twins(of, way);
  torch::manual_seed(5);
  const auto warm_up = of.draw(6);
  torch::manual_seed(6);
  train_parts(twins.net, *twins.optimizer, warm_up);
  torch::manual_seed(6);
  train_parts(twins.reference, *twins.reference_optimizer, warm_up);
  twins.optimizer->zero_grad();
  options.semantics = DataParallelSemantics::OneDevice;
  options.input_batch_dims = of.dims;
  auto compiled = compile(
      train_parts, {.parallel_mode = DataParallel(way.style, options), .backend = way.backend});
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto what = title + ", step " + std::to_string(i);
    torch::manual_seed(100 + static_cast<int>(i));
    const auto whole = of.draw(std::accumulate(lengths[i].begin(), lengths[i].end(), int64_t{0}));
    torch::manual_seed(7);
    const auto wanted = train_parts(twins.reference, *twins.reference_optimizer, whole);
    torch::manual_seed(7);
    const auto part = part_of_batch(of, whole, lengths[i], rank());
    const auto results = compiled(twins.net, *twins.optimizer, part);
    expect_near(results[0], wanted[0].detach(), what + ", loss");
    if (results.size() > 1) {
      auto samples = lengths[i];
      for (auto& each : samples) each *= of.per_sample;
      ParallelCase output;
      output.dims = {of.output_dim >= 0 ? std::optional(of.output_dim) : std::nullopt};
      expect_near(results[1], part_of_batch(output, {wanted[1].detach()}, samples, rank()).at(0),
                  what + ", output");
    }
    expect_equal_state(twins, what);
    if (::testing::Test::HasFailure()) break;
  }
  return explain(compiled);
}

Lengths even(int ranks) {
  const auto count = static_cast<size_t>(ranks);
  return {std::vector<int64_t>(count, 4), std::vector<int64_t>(count, 4),
          std::vector<int64_t>(count, 2)};
}

class OneDeviceRanks : public OnBackends {
 protected:
  void run_cases(const std::vector<ParallelCase>& cases, std::vector<int> ranks = {2, 3}) {
    for (const int count : ranks) {
      run(count, [&] {
        for (const auto& each : cases) {
          expect_as_one_device(each, {.style = "replicate"}, even(count));
          expect_as_one_device(each, {.style = "fully_shard", .adam = true}, even(count));
        }
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Of, OneDeviceRanks,
                         ::testing::ValuesIn(device_cases(torch::kCPU, {"shm"}, {2})),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, OneDeviceRanks, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

Tensors x_and_y(int64_t count) {
  const auto x = torch::randn({count, 3}, real());
  return {x, torch::randn({count, 2}, real())};
}

void two_layers(PartsImpl& net) {
  net.parameter(torch::randn({5, 3}, real()));
  net.parameter(torch::randn({5}, real()));
  net.parameter(torch::randn({2, 5}, real()));
}

Tensor layers(PartsImpl& net, const Tensor& x) {
  return torch::tanh(torch::linear(x, net.p[0], net.p[1])).mm(net.p[2].t());
}

ParallelCase with_loss(std::string name, std::function<Tensor(const Tensor&, const Tensor&)> loss) {
  return {std::move(name), two_layers,
          [loss](PartsImpl& net, const Tensors& given) -> Tensors {
            const auto out = layers(net, given[0]);
            return {loss(out, given[1]), out};
          },
          x_and_y};
}

ParallelCase mlp() {
  return with_loss("mlp", [](const auto& out, const auto& y) { return torch::mse_loss(out, y); });
}

TEST_P(OneDeviceRanks, TrainsAMlp) {
  run_cases({mlp(), with_loss("summed", [](const auto& out,
                                           const auto& y) { return (out - y).pow(2).sum(); })},
            {2, 3, 4});
}

ParallelCase transposed() {
  return {"batch on dim 1",
          two_layers,
          [](PartsImpl& net, const Tensors& given) -> Tensors {
            const auto out = layers(net, given[0].t()).t();
            return {(out - given[1]).pow(2).mean(), out.contiguous()};
          },
          [](int64_t count) -> Tensors {
            const auto x = torch::randn({3, count}, real());
            return {x, torch::randn({2, count}, real())};
          },
          {1, 1},
          1};
}

TEST_P(OneDeviceRanks, TakesBatchesAlongOtherDimensions) {
  const ParallelCase several{
      "different dims, and none",
      two_layers,
      [](PartsImpl& net, const Tensors& given) -> Tensors {
        const auto out = layers(net, given[0]) * given[2];
        return {((out - given[1].t()).pow(2) * given[3].unsqueeze(1)).mean() * given[4], out};
      },
      [](int64_t count) -> Tensors {
        const auto x = torch::randn({count, 3}, real());
        return {x, torch::randn({2, count}, real()), torch::rand({2}, real()),
                torch::rand({count}, real()), torch::rand({}, real())};
      },
      {0, -1, std::nullopt, -1, std::nullopt}};
  const ParallelCase attention{
      "attention of [positions, batch, width]",
      [](PartsImpl& net) {
        net.parameter(torch::randn({12, 4}, real()));
        net.parameter(torch::randn({4, 4}, real()));
        net.parameter(torch::randn({4}, real()));
      },
      [](PartsImpl& net, const Tensors& given) -> Tensors {
        const torch::nn::functional::MultiheadAttentionForwardFuncOptions options(
            4, 2, net.p[0], {}, {}, {}, false, 0.0, net.p[1], net.p[2]);
        const auto& x = given[0];
        const auto attended = torch::nn::functional::multi_head_attention_forward(x, x, x, options);
        const auto out = std::get<0>(attended) + x;
        return {torch::mse_loss(out, given[1]) + 2.0, out};
      },
      [](int64_t count) -> Tensors {
        const auto x = torch::randn({3, count, 4}, real());
        return {x, torch::randn_like(x)};
      },
      {1, 1},
      1};
  run_cases({transposed(), several, attention});
}

TEST_P(OneDeviceRanks, FollowsDimensionsThatAreJoinedSplitAndMoved) {
  const auto draw = [](int64_t count) -> Tensors {
    return {torch::randn({count, 4, 3}, real()), torch::randn({count, 4, 2}, real())};
  };
  const ParallelCase joined{"joined and split",
                            two_layers,
                            [](PartsImpl& net, const Tensors& given) -> Tensors {
                              const auto rows = given[0].size(0);
                              const auto flat = layers(net, given[0].reshape({-1, 3}));
                              const auto out = flat.view({rows, 4, 2});
                              return {torch::mse_loss(out, given[1]), flat};
                            },
                            draw,
                            {0, 0},
                            0,
                            4};
  const ParallelCase inner{"joined with outer dimensions", two_layers,
                           [](PartsImpl& net, const Tensors& given) -> Tensors {
                             const auto rows = given[0].size(0);
                             const auto moved = given[0].permute({1, 0, 2});  // [4, B, 3]
                             const auto flat = layers(net, moved.reshape({-1, 3}));
                             const auto out = flat.view({4, rows, 2}).transpose(0, 1).contiguous();
                             return {torch::mse_loss(out, given[1]), out};
                           },
                           draw};
  auto interleaved = inner;  // each rank's rows are not in one place: all are returned
  interleaved.name = "returned joined with outer dimensions";
  interleaved.output_dim = -1;
  interleaved.forward = [](PartsImpl& net, const Tensors& given) -> Tensors {
    const auto flat = layers(net, given[0].transpose(0, 1).reshape({-1, 3}));
    const auto wanted = given[1].transpose(0, 1).reshape({-1, 2});
    return {torch::mse_loss(flat, wanted), flat};
  };
  run_cases({joined, inner, interleaved});
}

/// Results along a batch that are not one row per sample, or several, are returned unsharded; so
/// are shards of parameters that happen to have as many rows.
TEST_P(OneDeviceRanks, ReturnsAllOfWhatIsNoBatch) {
  ParallelCase part{"part of the batch", two_layers,
                    [](PartsImpl& net, const Tensors& given) -> Tensors {
                      const auto out = layers(net, given[0]);
                      return {torch::mse_loss(out, given[1]), out.narrow(0, 1, 3)};
                    },
                    x_and_y};
  part.output_dim = -1;
  ParallelCase rows{"parameter with as many rows",
                    [](PartsImpl& net) { net.parameter(torch::randn({8, 3}, real())); },
                    [](PartsImpl& net, const Tensors& given) -> Tensors {
                      const auto out = given[0].mm(net.p[0].t());
                      return {(out.sum(1, true) - given[1]).pow(2).mean(), net.p[0].exp()};
                    },
                    x_and_y};
  rows.output_dim = -1;
  run(2, [&] {
    for (const auto* style : {"replicate", "fully_shard"}) {
      expect_as_one_device(part, {.style = style}, {{4, 4}, {5, 3}});
      expect_as_one_device(rows, {.style = style}, {{4, 4}, {5, 3}});
    }
  });
}

TEST_P(OneDeviceRanks, WritesPartsOfSamples) {
  run_cases({with_loss("columns", [](const auto& out, const auto& y) {
    const auto written = out.clone();
    written.narrow(1, 0, 1).mul_(2.0);
    written.select(1, 1).copy_(y.select(1, 0));
    return torch::mse_loss(written, y) + 1.0;
  })});
}

TEST_P(OneDeviceRanks, MakesConstantsOfTheBatch) {
  const ParallelCase shapes{
      "shapes in arguments", two_layers,
      [](PartsImpl& net, const Tensors& given) -> Tensors {
        const auto rows = given[0].size(0);
        auto out = layers(net, given[0]);
        const auto flat = out.clone().view({-1}).squeeze().unsqueeze(0);
        out = out + 0.1 * flat.view({rows, -1});
        const auto sums = torch::arange(2, real()).unsqueeze(0) + torch::ones(out.sizes(), real());
        const auto position = torch::arange(rows, real()).unsqueeze(1) * 0.01;
        const auto repeated = torch::full({2}, 0.5, real()).unsqueeze(0).repeat({rows, 1});
        out = out + sums + repeated + position + torch::zeros({rows, 1}, real()).expand({rows, 2});
        return {torch::mse_loss(out, given[1]), out};
      },
      x_and_y};
  run_cases({shapes});
}

TEST_P(OneDeviceRanks, WeighsAndMasksLosses) {
  const auto targets = [](int64_t count) -> Tensors {
    const auto x = torch::randn({count, 3}, real());
    auto y = torch::randint(0, 2, {count}, integer());
    y.index_put_({torch::arange(0, count, 3, integer())}, -100);
    return {x, y};
  };
  auto ignoring = with_loss("ignore_index", [](const auto& out, const auto& y) {
    return torch::nn::functional::cross_entropy(out, y);
  });
  auto weighted = with_loss("class weights", [](const auto& out, const auto& y) {
    return torch::nn::functional::cross_entropy(
        out, y,
        torch::nn::functional::CrossEntropyFuncOptions().weight(torch::tensor({0.3, 1.7}, real())));
  });
  ignoring.draw = weighted.draw = targets;
  const auto masked = with_loss("masked mean", [](const auto& out, const auto& y) {
    const auto mask = (y > 0.3).to(torch::kDouble);
    return ((out - y).pow(2) * mask).sum() / mask.sum();
  });
  const auto binary = with_loss("weighted binary", [](const auto& out, const auto& y) {
    return torch::nn::functional::binary_cross_entropy_with_logits(
        out, torch::sigmoid(y),
        torch::nn::functional::BinaryCrossEntropyWithLogitsFuncOptions().weight(y.abs()));
  });
  const auto root = with_loss("root of a mean", [](const auto& out, const auto& y) {
    return torch::mse_loss(out, y).sqrt() + torch::smooth_l1_loss(out, y) * 0.5;
  });
  run_cases({ignoring, weighted, masked, binary, root});
}

TEST_P(OneDeviceRanks, NormalizesOverTheWholeBatch) {
  const ParallelCase norm{"batch norm",
                          [](PartsImpl& net) {
                            two_layers(net);
                            net.parameter(torch::rand({5}, real()));
                            net.buffer(torch::zeros({5}, real()));
                            net.buffer(torch::ones({5}, real()));
                          },
                          [](PartsImpl& net, const Tensors& given) -> Tensors {
                            const auto hidden = given[0].mm(net.p[0].t());
                            const auto normed =
                                torch::batch_norm(hidden, net.p[1], net.p[3], net.b[0], net.b[1],
                                                  true, 0.1, 1e-5, false);
                            const auto out = torch::relu(normed).mm(net.p[2].t());
                            return {torch::mse_loss(out, given[1]), out};
                          },
                          x_and_y};
  run_cases({norm}, {2, 3});
}

TEST_P(OneDeviceRanks, ContrastsSamplesOfAllRanks) {
  const ParallelCase contrastive{"in-batch negatives", two_layers,
                                 [](PartsImpl& net, const Tensors& given) -> Tensors {
                                   const auto normed = [&](const Tensor& of) {
                                     return torch::nn::functional::normalize(layers(net, of));
                                   };
                                   const auto a = normed(given[0]), b = normed(given[0] + 0.1);
                                   const auto scores = a.mm(b.t()) / 0.1;
                                   const auto own = torch::arange(given[0].size(0), integer());
                                   const auto loss =
                                       torch::nn::functional::cross_entropy(scores, own) +
                                       torch::nn::functional::cross_entropy(scores.t(), own);
                                   return {loss, a};
                                 },
                                 x_and_y};
  run_cases({contrastive}, {2, 3, 4});
}

/// One operator after a layer, of every family.
ParallelCase after_layer(std::string name, std::function<Tensor(const Tensor&)> family) {
  return with_loss(std::move(name), [family](const Tensor& out, const Tensor& y) {
    const auto result = family(out);
    return (result * torch::arange(result.numel(), real()).cos().view(result.sizes())).sum() +
           torch::mse_loss(out, y);
  });
}

TEST_P(OneDeviceRanks, TakesEveryFamilyOfOperators) {
  const std::vector<ParallelCase> cases = {
      after_layer("softmax over the batch", [](auto x) { return torch::softmax(x, 0); }),
      after_layer("log softmax over classes", [](auto x) { return torch::log_softmax(x, 1); }),
      after_layer("logsumexp", [](auto x) { return torch::logsumexp(x, 0); }),
      after_layer("sort", [](auto x) { return std::get<0>(x.sort(0)); }),
      after_layer("topk", [](auto x) { return std::get<0>(x.topk(2, 0)); }),
      after_layer("cumsum", [](auto x) { return x.cumsum(0); }),
      after_layer("max", [](auto x) { return std::get<0>(x.max(0)); }),
      after_layer("variance", [](auto x) { return x.var(0); }),
      after_layer("norm", [](auto x) { return x.norm(2, 0); }),
      after_layer("product with itself", [](auto x) { return x.mm(x.t()); }),
      after_layer("batched product", [](auto x) { return x.unsqueeze(2).bmm(x.unsqueeze(1)); }),
      after_layer("layer norm", [](auto x) { return torch::layer_norm(x, {2}); }),
      after_layer("cat", [](auto x) { return torch::cat({x, x * 2}, 0); }),
      after_layer("stack", [](auto x) { return torch::stack({x, x.tanh()}, 1); }),
      after_layer("flip", [](auto x) { return x.flip(0); }),
      after_layer("slice", [](auto x) { return x.narrow(0, 1, 2); }),
      after_layer("where", [](auto x) { return torch::where(x > 0, x, x * 0.1); }),
      after_layer("center", [](auto x) { return x - x.mean(0, true); }),
      after_layer("gather",
                  [](auto x) { return x.gather(1, torch::zeros({x.size(0), 1}, integer())); }),
      after_layer("index", [](auto x) { return x.index({torch::tensor({0, 2, 2}, integer())}); }),
  };
  run_cases(cases, {2});
}

TEST_P(OneDeviceRanks, TakesEmbeddingsAndConvolutions) {
  const ParallelCase words{"embedding",
                           [](PartsImpl& net) {
                             net.parameter(torch::randn({7, 3}, real()));
                             net.parameter(torch::randn({2, 3}, real()));
                           },
                           [](PartsImpl& net, const Tensors& given) -> Tensors {
                             const auto out =
                                 torch::embedding(net.p[0], given[0]).mean(1).mm(net.p[1].t());
                             return {torch::mse_loss(out, given[1]), out};
                           },
                           [](int64_t count) -> Tensors {
                             const auto x = torch::randint(0, 7, {count, 4}, integer());
                             return {x, torch::randn({count, 2}, real())};
                           }};
  const ParallelCase images{"convolution",
                            [](PartsImpl& net) {
                              net.parameter(torch::randn({4, 3, 3, 3}, real()));
                              net.parameter(torch::randn({2, 4}, real()));
                            },
                            [](PartsImpl& net, const Tensors& given) -> Tensors {
                              const auto maps =
                                  torch::relu(torch::conv2d(given[0], net.p[0], {}, 1, 1));
                              const auto pooled = torch::max_pool2d(maps, 2);
                              const auto out = pooled.mean(at::IntArrayRef{2, 3}).mm(net.p[1].t());
                              return {torch::mse_loss(out, given[1]), out};
                            },
                            [](int64_t count) -> Tensors {
                              const auto x = torch::randn({count, 3, 6, 6}, real());
                              return {x, torch::randn({count, 2}, real())};
                            }};
  run_cases({words, images}, {2});
}

TEST_P(OneDeviceRanks, DropsWhatOneDeviceWouldDrop) {
  const auto dropping = with_loss("dropout", [](const auto& out, const auto& y) {
    return torch::mse_loss(torch::dropout(out, 0.4, true), y);
  });
  const auto fused = with_loss("fused dropout", [](const auto& out, const auto& y) {
    return torch::mse_loss(std::get<0>(torch::native_dropout(out, 0.4, true)), y);
  });
  const auto pending = with_loss("dropout of a sum", [](const auto& out, const auto& y) {
    const auto dropped = std::get<0>(torch::native_dropout(out.sum(0), 0.4, true));
    return torch::mse_loss(out, y) + dropped.pow(2).sum();
  });
  run_cases({dropping, fused, pending}, {2, 3});
}

TEST_P(OneDeviceRanks, TakesUnevenBatches) {
  const std::vector<std::pair<int, Lengths>> runs = {
      {2, {{4, 4}, {4, 1}, {4, 4}, {5, 0}, {4, 1}}},
      {3, {{4, 4, 4}, {4, 4, 2}, {2, 1, 1}, {4, 4, 4}}},
      {4, {{3, 3, 3, 3}, {3, 3, 3, 1}, {1, 2, 3, 4}}},
  };
  const DataParallelOptions uneven{.uneven_batches = true};
  for (const auto& [ranks, lengths] : runs) {
    run(ranks, [&, lengths = lengths] {
      for (const auto* style : {"replicate", "fully_shard"}) {
        const auto text = expect_as_one_device(mlp(), {.style = style}, lengths, uneven);
        EXPECT_THAT(text, HasSubstr("samples, which are moved"));
        const auto masked = with_loss("masked mean", [](const auto& out, const auto& y) {
          const auto mask = (y > 0.3).to(torch::kDouble);
          return ((out - y).pow(2) * mask).sum() / mask.sum() + (out.mm(out.t())).pow(2).mean();
        });
        expect_as_one_device(masked, {.style = style}, lengths, uneven);
        expect_as_one_device(transposed(), {.style = style}, lengths, uneven);
      }
    });
  }
}

/// Ranks agree on sizes when programs are made, and on nothing at later calls.
TEST_P(OneDeviceRanks, ExchangesNothingBesideItsProgram) {
  const ParallelCase alone{"", two_layers,
                           [](PartsImpl& net, const Tensors& given) -> Tensors {
                             return {given[0].mm(net.p[0].t())};  // no rank needs another
                           },
                           x_and_y};
  run(2, [&] {
    const auto messages = [] {
      return default_group()->getBackend(run_device().type())->getSequenceNumberForGroup();
    };
    for (const bool is_uneven : {false, true}) {
      auto net = make_parts(alone);
      auto compiled = compile([](Parts& module, const Tensors& given) { return module(given); },
                              {.parallel_mode = DataParallel(
                                   "replicate", {.semantics = DataParallelSemantics::OneDevice,
                                                 .uneven_batches = is_uneven}),
                               .backend = "interpret"});
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 2; ++i) compiled(net, x_and_y(3));
      const auto before = messages();
      for (int i = 0; i < 5; ++i) compiled(net, x_and_y(3));
      EXPECT_EQ(messages() - before, is_uneven ? 5U : 0U);
    }
  });
}

TEST(OneDeviceErrorsRanks, ABatchThatChangesOnOneRankAloneIsAnErrorOnAll) {
  run_processes(2, [] {
    expect_as_one_device(mlp(), {}, {{4, 4}, {4, 3}}, {.uneven_batches = true});
    EXPECT_THAT([] { expect_as_one_device(mlp(), {}, {{4, 3}, {4, 3}, {4, 2}}); },
                ThrowsMessage<c10::DistBackendError>(
                    AllOf(HasSubstr("the ranks disagree"), HasSubstr("uneven_batches = true"))));
  });
}

TEST_P(OneDeviceRanks, RunsThroughGeneratedKernels) {
  run(2, [] {
    const auto mixing = with_loss("mixing", [](const auto& out, const auto& y) {
      const auto mask = (y > 0.3).to(torch::kDouble);
      return ((out.softmax(0) - y).pow(2) * mask).sum() / mask.sum();
    });
    for (const auto* style : {"replicate", "fully_shard"})
      expect_as_one_device(mixing, {.style = style, .adam = true, .backend = "codegen"}, even(2));
  });
}

TEST_P(OneDeviceRanks, TellsWhatMixingCosts) {
  run(2, [] {
    const auto sorted = after_layer("sort", [](auto x) { return std::get<0>(x.sort(0)); });
    const auto text = expect_as_one_device(sorted, {}, {{4, 4}});
    EXPECT_THAT(text, ContainsRegex("aten::sort takes samples of several ranks: 'all_[a-z_]+' of "
                                    "[0-9]+ bytes of activations"));
    const auto plain = expect_as_one_device(mlp(), {}, {{4, 4}});
    EXPECT_THAT(plain, Not(HasSubstr("samples of several ranks")));
    EXPECT_THAT([&] { expect_as_one_device(sorted, {}, {{4, 4}}, {.on_mix = OnMix::Error}); },
                ThrowsMessage<c10::ValueError>(
                    HasSubstr("DataParallel: expected operators that treat samples one by one "
                              "(on_mix = Error), got aten::sort")));
    // Parameters that are gathered, a bias beside the batch among them, are no samples.
    for (const auto* style : {"replicate", "fully_shard"}) {
      const auto told =
          expect_as_one_device(mlp(), {.style = style}, {{4, 4}}, {.on_mix = OnMix::Error});
      EXPECT_THAT(told, Not(HasSubstr("samples of several ranks")));
    }
  });
}

TEST_P(OneDeviceRanks, ReturnsDistributedTensors) {
  run(2, [] {
    auto net = make_parts(mlp()), reference = make_parts(mlp());
    const auto optimizer = optimizer_for(net, false), other = optimizer_for(reference, false);
    torch::manual_seed(3);
    const auto whole = x_and_y(6);
    train_parts(net, *optimizer, whole);
    train_parts(reference, *other, whole);
    optimizer->zero_grad();
    auto compiled = compile(
        train_parts,
        {.parallel_mode = DataParallel("replicate", {.semantics = DataParallelSemantics::OneDevice,
                                                     .returns_dtensors = true}),
         .backend = "interpret"});
    const auto results = compiled(net, *optimizer, part_of_batch(mlp(), whole, {3, 3}, rank()));
    const auto wanted = train_parts(reference, *other, whole);
    ASSERT_TRUE(is_dtensor(results[0]) && is_dtensor(results[1]));
    EXPECT_TRUE(DTensor::of(results[0]).placements().at(0).is_partial());
    EXPECT_EQ(DTensor::of(results[1]).placements(), Placements{Shard(0)});
    for (size_t i = 0; i < 2; ++i)
      expect_near(DTensor::of(results[i]).full_tensor(), wanted[i].detach(), "result");
  });
}

TEST(OneDeviceErrorsRanks, TellsOfTheWholeBatch) {
  run_processes(2, [] {
    auto net = make_parts(mlp());
    const auto optimizer = optimizer_for(net, false);
    torch::manual_seed(3);
    train_parts(net, *optimizer, x_and_y(6));
    optimizer->zero_grad();
    auto compiled =
        compile(train_parts, {.parallel_mode = DataParallel(
                                  "replicate", {.input_batch_dims = {1, std::nullopt},
                                                .semantics = DataParallelSemantics::OneDevice})});
    EXPECT_THAT([&] { compiled(net, *optimizer, x_and_y(4)); },
                ThrowsMessage<c10::Error>(
                    AllOf(HasSubstr("the step was captured on the whole batch, argument 0 of "
                                    "sizes [4, 6]"),
                          HasSubstr("give input_batch_dims"))));
    EXPECT_FALSE(is_dtensor(net->p[0]));
  });
}

}  // namespace
}  // namespace tessera::testing
