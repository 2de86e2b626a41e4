// Derivatives that look for the elements that equal the result, of inputs whose summands round.
#include "dtensor/placed.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

struct NamedDerivative {
  const char* name;
  std::function<at::Tensor(const Tensors&)> function;
};

const at::Tensor& indices() {
  static const auto kIndices = torch::arange(77).remainder(5).view({7, 11});
  return kIndices;
}

at::Tensor placed_indices(const Tensors& x) {
  if (!is_dtensor(x[0])) return indices();
  const auto mesh = DTensor::of(x[0]).mesh();
  return DTensor::from_local(indices(), mesh, Placements(mesh.ndim()));
}

at::Tensor placed_list(const Tensors& x) { return placed_indices(x).select(1, 0); }

const std::vector<NamedDerivative>& functions() {
  static const std::vector<NamedDerivative> kFunctions = {
      {"amax", [](const Tensors& x) { return x[0].amax(0); }},
      {"amin", [](const Tensors& x) { return x[0].amin(1, /*keepdim=*/true); }},
      {"aminmax",
       [](const Tensors& x) {
         const auto [low, high] = x[0].aminmax(1);
         return low * 2 + high;
       }},
      {"max", [](const Tensors& x) { return x[0].max(); }},
      {"min", [](const Tensors& x) { return x[0].min(); }},
      {"median", [](const Tensors& x) { return x[0].median(); }},
      {"nanmedian", [](const Tensors& x) { return x[0].nanmedian(); }},
      {"vector_norm",
       [](const Tensors& x) { return torch::linalg_vector_norm(x[0], kInfinity, 1); }},
      {"norm", [](const Tensors& x) { return x[0].norm(kInfinity, 0); }},
      {"foreach norm",
       [](const Tensors& x) {
         const auto norms = torch::_foreach_norm({x[0], x[1]}, kInfinity);
         return norms[0] + norms[1] * 2;
       }},
      {"dist", [](const Tensors& x) { return torch::dist(x[0], x[1], kInfinity); }},
      {"cdist", [](const Tensors& x) { return torch::cdist(x[0], x[1], kInfinity); }},
      {"scatter_reduce",
       [](const Tensors& x) { return x[0].scatter_reduce(0, placed_indices(x), x[1], "amax"); }},
      {"scatter_reduce alone",
       [](const Tensors& x) {
         return x[0].scatter_reduce(1, placed_indices(x), x[1], "amin", /*include_self=*/false);
       }},
      {"index_reduce",
       [](const Tensors& x) { return x[0].index_reduce(0, placed_list(x), x[1], "amax"); }},
  };
  return kFunctions;
}

/// This rank's summand of every element, all of them rounded: what they add up to depends on the
/// order.
at::Tensor summand(const at::Tensor& whole, int64_t ranks, int64_t rank) {
  const auto share = [&](int64_t of) {
    const auto angle = torch::arange(whole.numel()) * (3 * of + 1) + of;
    return torch::sin(angle.to(torch::kFloat)).view(whole.sizes());
  };
  if (rank > 0) return whole * share(rank);
  auto rest = whole.clone();
  for (int64_t other = 1; other < ranks; ++other) rest -= whole * share(other);
  return rest;
}

DTensor rounded(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  auto part = whole;
  auto shards = placements;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_partial()) continue;
    const auto mesh_dim = static_cast<int64_t>(i);
    const auto ranks = mesh.size(mesh_dim);
    part = summand(part, ranks, mesh.local_rank(mesh_dim));
    if (placements[i].reduce_op() == ReduceOp::AVG) part = part * static_cast<double>(ranks);
    shards[i] = Replicate();
  }
  return DTensor::from_local(part_by_hand(part, mesh, shards), mesh, placements,
                             {.shape = whole.sizes().vec(), .stride = whole.strides().vec()});
}

/// No two elements are close, of either input.
Tensors wholes() {
  const auto spread = torch::arange(77, torch::kFloat).mul(23).remainder(77).view({7, 11});
  return {spread * 0.7134 - 29.1, spread.flip(0) * 0.6971 - 23.3};
}

void expect_as_on_one_device(const NamedDerivative& named, const DeviceMesh& mesh,
                             const Placements& placements) {
  const auto label = c10::str(named.name, " of ", placements);
  Tensors plain;
  Tensors leaves;
  for (const auto& whole : wholes()) {
    plain.push_back(whole.clone().requires_grad_());
    leaves.push_back(rounded(whole, mesh, placements).requires_grad_());
  }
  const auto expected = named.function(plain);
  const auto actual = named.function(leaves);
  const Tolerance tolerance{1e-4, 1e-4};
  expect_equal(full_of(actual), expected.detach(), label, tolerance);
  const auto gradient = torch::linspace(0.5, 1.5, expected.numel()).view(expected.sizes());
  try {
    expected.backward(gradient);
  } catch (const c10::Error&) {
    return;  // older versions of libtorch have no derivative of some
  }
  actual.backward(placed(gradient, mesh, Placements(placements.size())));
  for (size_t i = 0; i < plain.size(); ++i) {
    if (!plain[i].grad().defined()) continue;
    expect_equal(full_of(leaves[i].grad()), plain[i].grad(), label + ", gradient", tolerance);
  }
}

class ReducedOnce : public ::testing::TestWithParam<const char*> {};

TEST_P(ReducedOnce, GradientsFindTheElementsThatEqualTheResult) {
  const auto on_mesh = [&](const MeshShape& shape, const std::vector<Placements>& all) {
    run_threads(static_cast<int>(c10::multiply_integers(shape)),
                [&] {
                  const auto mesh = init_device_mesh(torch::kCPU, shape);
                  for (const auto& named : functions()) {
                    for (const auto& one : all) expect_as_on_one_device(named, mesh, one);
                  }
                },
                {.backend = GetParam(), .timeout = std::chrono::seconds(20)});
  };
  on_mesh({3}, {{Partial()}, {Partial("avg")}});
  on_mesh({2, 3}, {{Partial(), Partial()},
                   {Partial("avg"), Partial("avg")},
                   {Shard(0), Partial()},
                   {Partial("avg"), Shard(1)}});
}

INSTANTIATE_TEST_SUITE_P(OnThreads, ReducedOnce, ::testing::Values("shm", "gloo"),
                         [](const auto& test) { return std::string(test.param); });

TEST(ReducedOnceOnThreads, OneReductionServesForwardAndBackward) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto leaf = rounded(wholes()[0], mesh, {Partial()}).requires_grad_();
    const comm_debug scope;
    const auto result = leaf.amax(1);
    EXPECT_EQ(scope.counts().at("reduce_scatter").collectives, 1);
    result.backward(placed(torch::ones({7}), mesh, {Replicate()}));
    EXPECT_EQ(scope.counts().at("reduce_scatter").collectives, 1);
    EXPECT_EQ(scope.counts().count("all_reduce"), 0U);
  });
}

}  // namespace
}  // namespace tessera::testing
