// Cross entropy on logits whose classes are sharded: equal to the plain one, without gathering.
#include "compose/on_device.h"
#include "parallel/models.h"
#include "support/ranks.h"
#include "support/sub_tests.h"

namespace tessera::testing {
namespace {

namespace F = torch::nn::functional;

at::Tensor drawn(at::IntArrayRef sizes, uint64_t seed) { return drawn_on_device(sizes, seed) * 3; }
at::Tensor drawn_targets(int64_t classes, at::IntArrayRef sizes, uint64_t seed) {
  return at::randint(classes, sizes, at::detail::createCPUGenerator(seed), at::kLong)
      .to(run_device());
}

struct Case {
  std::vector<int64_t> logits;
  std::vector<int64_t> target;
};

void expect_equal_losses(const Case& which, const F::CrossEntropyFuncOptions& options,
                         at::ScalarType dtype = at::kFloat) {
  const auto mesh = mesh_of_all(run_device().type());
  const int64_t dim = which.logits.size() == 1 ? 0 : 1;
  const int64_t classes = which.logits[dim];
  auto plain = drawn(which.logits, 3).to(dtype).requires_grad_();
  auto target = drawn_targets(classes, which.target, 4);
  if (target.dim() > 0) target.view({-1})[0] = options.ignore_index();
  auto parallel = distribute_tensor(plain.detach(), mesh, {Shard(dim)}).requires_grad_();

  const auto expected = F::cross_entropy(plain, target, options);
  comm_debug counted;
  const loss_parallel scope;
  const auto loss = F::cross_entropy(parallel, target, options);
  EXPECT_EQ(DTensor::of(loss).placements(), Placements{Replicate()});
  EXPECT_EQ(counted.counts().count("all_gather"), 0U) << counted.to_string();
  expect_equal(DTensor::of(loss).to_local().detach(), expected.detach(), "loss");

  const auto weights = drawn(expected.sizes(), 5).to(dtype);
  expected.backward(weights);
  loss.backward(DTensor::from_local(weights, mesh));
  EXPECT_EQ(counted.counts().count("all_gather"), 0U) << counted.to_string();
  EXPECT_EQ(DTensor::of(parallel.grad()).placements(), Placements{Shard(dim)});
  expect_equal(full_value(parallel.grad()), plain.grad(), "gradient",
               dtype == at::kBFloat16 ? std::optional<Tolerance>({2e-2, 1e-3}) : std::nullopt);
}

void expect_all_forms() {
  const Case cases[] = {{{6, 11}, {6}},       {{6, 3}, {6}},  // 3 classes: an empty part on 4 ranks
                        {{11}, {}},           {{2, 11, 3, 5}, {2, 3, 5}},
                        {{2, 11, 4}, {2, 4}}, {{2, 8, 2, 2, 3}, {2, 2, 2, 3}}};
  for (const auto& which : cases) {
    SCOPED_TRACE(c10::str(c10::IntArrayRef(which.logits)));
    const auto weight = drawn({which.logits[which.logits.size() == 1 ? 0 : 1]}, 9).abs();
    expect_equal_losses(which, F::CrossEntropyFuncOptions());
    expect_equal_losses(which, F::CrossEntropyFuncOptions().reduction(torch::kSum));
    expect_equal_losses(which, F::CrossEntropyFuncOptions().reduction(torch::kNone));
    expect_equal_losses(which, F::CrossEntropyFuncOptions().ignore_index(1));
    expect_equal_losses(which, F::CrossEntropyFuncOptions().weight(weight).ignore_index(2));
    expect_equal_losses(which, F::CrossEntropyFuncOptions().weight(weight).reduction(torch::kNone));
  }
}

class LossParallelOn : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, LossParallelOn,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, LossParallelOn, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

TEST_P(LossParallelOn, EqualsThePlainLossOnProcesses) { run(4, expect_all_forms); }
TEST(LossParallelOnThreads, EqualsThePlainLoss) { run_threads(3, expect_all_forms); }

TEST_P(LossParallelOn, TakesDoubleAndBfloat16) {
  run(2, [] {
    expect_equal_losses({{6, 11}, {6}}, F::CrossEntropyFuncOptions(), at::kDouble);
    expect_equal_losses({{6, 11}, {6}}, F::CrossEntropyFuncOptions(), at::kBFloat16);
  });
}

TEST_P(LossParallelOn, HoldsForLargeLogits) {
  run(2, [] {
    const auto mesh = mesh_of_all(run_device().type());
    const auto logits = drawn({4, 10}, 1) * 1e4;
    const auto expected = logits.log_softmax(1);
    const loss_parallel scope;
    expect_equal(full_value(distribute_tensor(logits, mesh, {Shard(1)}).log_softmax(1)), expected);
  });
}

TEST_P(LossParallelOn, EndsWithTheScope) {
  run(2, [] {
    const auto mesh = mesh_of_all(run_device().type());
    const auto logits = distribute_tensor(drawn({4, 10}, 1), mesh, {Shard(1)});
    const auto expected = full_value(logits).log_softmax(1);
    const auto gathers = [&] {
      comm_debug counted;
      expect_equal(full_value(logits.log_softmax(1)), expected);
      // The comparison gathers once.
      return counted.counts().count("all_reduce") == 0;
    };
    EXPECT_TRUE(gathers());
    {
      const loss_parallel scope;
      EXPECT_FALSE(gathers());
      const loss_parallel inner;
      EXPECT_FALSE(gathers());
    }
    EXPECT_TRUE(gathers()) << "what was chosen inside is not remembered outside";
  });
}

TEST_P(LossParallelOn, BackwardOutsideOfTheScopeIsRightToo) {
  run(2, [] {
    const auto mesh = mesh_of_all(run_device().type());
    auto plain = drawn({6, 11}, 3).requires_grad_();
    const auto target = drawn_targets(11, {6}, 4);
    auto parallel = distribute_tensor(plain.detach(), mesh, {Shard(1)}).requires_grad_();
    at::Tensor loss;
    {
      const loss_parallel scope;
      loss = F::cross_entropy(parallel, DTensor::from_local(target, mesh));
    }
    loss.backward();
    F::cross_entropy(plain, target).backward();
    expect_equal(full_value(parallel.grad()), plain.grad(), "gradient");
  });
}

TEST_P(LossParallelOn, TakesRowsShardedOverAnotherMeshDimension) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    auto plain = drawn({6, 11}, 3).requires_grad_();
    const auto target = drawn_targets(11, {6}, 4);
    for (const auto& placements : {Placements{Shard(0), Shard(1)}, Placements{Shard(1), Shard(1)},
                                   Placements{Replicate(), Shard(1)}}) {
      auto parallel = distribute_tensor(plain.detach(), mesh, placements).requires_grad_();
      const auto rows = placements[0] == Shard(0) ? Shard(0) : Replicate();
      const loss_parallel scope;
      const auto loss =
          F::cross_entropy(parallel, distribute_tensor(target, mesh, {rows, Replicate()}));
      const auto expected = F::cross_entropy(plain, target);
      expect_equal(full_value(loss).detach(), expected.detach(), "loss");
      loss.backward();
      plain.mutable_grad() = at::Tensor();
      expected.backward();
      expect_equal(full_value(parallel.grad()), plain.grad(), "gradient");
    }
  });
}

}  // namespace
}  // namespace tessera::testing
