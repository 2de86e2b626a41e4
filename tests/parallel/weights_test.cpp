// Weights that modules share, and weights that hold several matrices.
#include "parallel/models.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace tessera::testing {
namespace {

/// A Linear whose weight is another module's.
struct SharingLinearImpl : torch::nn::LinearImpl {
  explicit SharingLinearImpl(const at::Tensor& shared)
      : LinearImpl(torch::nn::LinearOptions(shared.size(1), shared.size(0)).bias(false)) {
    weight = shared;
    parameters_["weight"] = shared;
  }
};
TESSERA_MODULE(SharingLinear);

struct TiedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) { return head(words(tokens)); }
  nn::Embedding words{register_module("words", nn::Embedding(11, 6))};
  SharingLinear head{register_module("head", SharingLinear(words->weight))};
};
TESSERA_MODULE(Tied);

/// Ties as libtorch's users do: the member alone.
struct TiedByMemberImpl : torch::nn::Module {
  TiedByMemberImpl() { head->weight = words->weight; }
  at::Tensor forward(const at::Tensor& tokens) { return head(words(tokens)); }
  nn::Embedding words{register_module("words", nn::Embedding(11, 6))};
  nn::Linear head{register_module("head", nn::Linear(torch::nn::LinearOptions(6, 11).bias(false)))};
};
TESSERA_MODULE(TiedByMember);

template <class M>
void expect_tied_training() {
  auto [plain, parallel] = twins<M>(8);
  const auto* identity = parallel->words->weight.unsafeGetTensorImpl();
  parallelize_module(
      parallel, mesh_of_all(),
      {{"words", RowwiseParallel()}, {"head", ColwiseParallel({.output_layouts = Replicate()})}});
  EXPECT_EQ(parallel->head->weight.unsafeGetTensorImpl(), identity) << "one tensor, as before";
  EXPECT_EQ(DTensor::of(parallel->words->weight).placements(), Placements{Shard(0)});
  torch::manual_seed(7);
  expect_equal_steps(
      plain, {plain->words->weight}, parallel, {parallel->words->weight},
      {.lr = 1e-3, .input = [](int) { return torch::randint(11, {3, 8}, torch::kLong); }});
  expect_equal(full_value(parallel->words->weight).detach(), plain->words->weight.detach());
}

TEST(Weights, TiedEmbeddingAndHead) {
  run_processes(4, [] {
    expect_tied_training<Tied>();
    expect_tied_training<TiedByMember>();
  });
}

/// Heads and their parts from one fused weight: [batch, tokens, width] -> the same.
struct FusedAttentionImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, -1, 2}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    return out(mixed.transpose(1, 2).flatten(2));
  }
  nn::Linear qkv{register_module("qkv", nn::Linear(8, 24))};
  nn::Linear out{register_module("out", nn::Linear(8, 8))};
};
TESSERA_MODULE(FusedAttention);

TEST(Weights, PackedWeightsAreSplitByHead) {
  run_processes(2, [] {
    auto [plain, parallel] = twins<FusedAttention>(8);
    parallelize_module(parallel, mesh_of_all(),
                       {{"qkv", ColwiseParallel({.heads = 4, .packed = 3})},
                        {"out", RowwiseParallel({.heads = 4})}});
    torch::manual_seed(7);
    expect_equal_steps(plain, plain->parameters(), parallel, parallel->parameters(),
                       {.input = [](int) { return torch::rand({2, 5, 8}); }});
    const auto ranks = full_value(parallel->qkv->weight).detach();
    EXPECT_FALSE(at::allclose(ranks, plain->qkv->weight)) << "in the order of ranks";
    expect_equal(unpack_rows(ranks, 3, 2), plain->qkv->weight.detach());
    expect_equal(unpack_rows(full_value(parallel->qkv->bias).detach(), 3, 2),
                 plain->qkv->bias.detach());
    EXPECT_TRUE(at::equal(pack_rows(unpack_rows(ranks, 3, 2), 3, 2), ranks));
    // A rank's part is a small fused weight.
    const auto own = DTensor::of(parallel->qkv->weight).to_local().detach();
    expect_equal(own,
                 at::cat({plain->qkv->weight.detach().slice(0, 4 * rank(), 4 * rank() + 4),
                          plain->qkv->weight.detach().slice(0, 8 + 4 * rank(), 12 + 4 * rank()),
                          plain->qkv->weight.detach().slice(0, 16 + 4 * rank(), 20 + 4 * rank())}));
  });
}

}  // namespace
}  // namespace tessera::testing
