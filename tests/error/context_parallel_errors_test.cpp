#include <tessera/nn.h>
#include <tessera/parallelize.h>

#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ContextParallelErrors : public ::testing::Test {
 protected:
  const FakeWorld world_{1, 4};
  const DeviceMesh mesh_ = mesh_of_all();
  const at::Tensor x_ = at::randn({2, 4, 6, 8});
  const RingAttentionOptions causal_{.mesh = mesh_, .is_causal = true};
};

TEST_F(ContextParallelErrors, SequencesThatCantBeCut) {
  const auto whole = at::zeros({2, 12});
  EXPECT_THAT(message_of([&] { context_parallel_shard(whole, 1, mesh_); }),
              AllOf(HasSubstr("context_parallel_shard: expected a sequence of 8 equal chunks, two "
                              "for each rank, got length 12 in dimension 1 of [2, 12]"),
                    HasSubstr("cut it to 8, or pad it to 16")));
  EXPECT_THAT(message_of([&] { context_parallel_shard(whole, 0, mesh_, {.load_balance = false}); }),
              HasSubstr("expected a sequence of 4 equal chunks, got length 2"));
  EXPECT_THAT(message_of([&] { context_parallel_shard(whole, 2, mesh_); }),
              HasSubstr("context_parallel_shard: expected a seq_dim of a tensor of sizes [2, 12]"));
  EXPECT_THAT(message_of([&] { context_parallel_shard(at::Tensor(), 0, mesh_); }),
              HasSubstr("expected a dense tensor, got an undefined one"));
  EXPECT_THAT(message_of([&] { context_parallel_unshard(at::zeros({3}), 0, mesh_); }),
              HasSubstr("context_parallel_unshard: expected an even local_length"));
  EXPECT_THAT(message_of([&] { context_parallel_positions(3, mesh_); }),
              HasSubstr("context_parallel_positions: expected an even local_length"));
}

TEST_F(ContextParallelErrors, MeshesOfOneDimension) {
  const auto grid = init_device_mesh(at::kCPU, {2, 2}, {"cp", "tp"});
  EXPECT_THAT(message_of([&] { context_parallel_shard(x_, 2, grid); }),
              AllOf(HasSubstr("expected a 1-D mesh, got 2-D"), HasSubstr("mesh[\"cp\"]")));
  EXPECT_THAT(message_of([&] { ring_attention(x_, x_, x_, {.mesh = grid}); }),
              HasSubstr("ring_attention: expected a 1-D mesh, got 2-D"));
  EXPECT_THAT(message_of([&] { ring_attention(x_, x_, x_); }),
              HasSubstr("ring_attention: expected a mesh, or a MeshScope around the call"));
}

TEST_F(ContextParallelErrors, TensorsThatDoNotGoTogether) {
  const auto message = [&](const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value) {
    return message_of([&] { ring_attention(query, key, value, causal_); });
  };
  EXPECT_THAT(message(at::Tensor(), x_, x_), HasSubstr("got an undefined tensor"));
  EXPECT_THAT(message(x_, x_[0], x_), HasSubstr("of [batch, heads, local_length, head_dim]"));
  EXPECT_THAT(message(x_.narrow(2, 0, 0), x_, x_), HasSubstr("none of them empty"));
  EXPECT_THAT(message(x_, x_.to(at::kDouble), x_),
              HasSubstr("one floating-point dtype, got Float, Double and Float"));
  EXPECT_THAT(message(x_, x_, x_.narrow(2, 0, 4)), HasSubstr("as many keys as values"));
  EXPECT_THAT(message(x_, x_.narrow(3, 0, 4), x_), HasSubstr("one head_dim of queries and keys"));
  EXPECT_THAT(message(x_, x_.narrow(1, 0, 2), x_.narrow(1, 0, 2)),
              AllOf(HasSubstr("expected as many heads of queries as of keys, got sizes"),
                    HasSubstr("set .enable_gqa")));
  EXPECT_THAT(message(x_, x_.narrow(2, 0, 4), x_.narrow(2, 0, 4)),
              HasSubstr("as many queries as keys for is_causal, got 6 and 4"));
  const auto odd = x_.narrow(2, 0, 5);
  EXPECT_THAT(message(odd, odd, odd), AllOf(HasSubstr("expected an even local_length"),
                                            HasSubstr("got 5"), HasSubstr(".load_balance")));
}

TEST_F(ContextParallelErrors, DistributedTensorsThatAreCutWithinASequence) {
  const auto place = [&](const at::Tensor& tensor, const Placement& placement) {
    return at::Tensor(DTensor::from_local(tensor, mesh_, {placement}));
  };
  const auto by_sequence = place(x_, Shard(2)), by_head = place(x_, Shard(1));
  EXPECT_THAT(message_of([&] { ring_attention(by_sequence, by_sequence, by_sequence, causal_); }),
              AllOf(HasSubstr("expected DTensors sharded by batch or heads, evenly"),
                    HasSubstr("context_parallel_shard")));
  EXPECT_THAT(message_of([&] { ring_attention(by_head, x_, x_, causal_); }),
              HasSubstr("DTensors, or plain tensors, all of them; got both"));
  EXPECT_THAT(
      message_of([&] { ring_attention(by_head, place(x_, Replicate()), by_head, causal_); }),
      HasSubstr("expected DTensors of one mesh, placed alike"));
}

TEST_F(ContextParallelErrors, SecondDerivatives) {
  const auto query = x_.detach().requires_grad_();
  const auto out = ring_attention(query, x_, x_, causal_).sum();
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                torch::autograd::grad({out}, {query}, {}, /*retain_graph=*/true,
                                      /*create_graph=*/true);
              }),
              HasSubstr("ring_attention: expected a backward without create_graph"));
}

/// Attention in several ways that a rank with a part of the sequence can't compute.
struct WayImpl : torch::nn::Module {
  explicit WayImpl(int64_t way) : way(way) {}
  at::Tensor forward(const at::Tensor& x) {
    if (way == 0) return x.matmul(x.transpose(-2, -1)).softmax(-1).matmul(x);
    if (way == 1) return at::scaled_dot_product_attention(x, x, x, at::ones({6, 6}, at::kBool));
    return at::scaled_dot_product_attention(x, x, x, {}, /*dropout_p=*/0.5, true);
  }
  int64_t way;
};
TESSERA_MODULE(Way, "x");

TEST_F(ContextParallelErrors, AttentionThatCantGoRound) {
  const auto way = [&](int64_t index) {
    Way module(index);
    return parallelize_module(module, mesh_, ContextParallel());
  };
  EXPECT_THAT(message_of([&] { way(0)(x_); }),
              AllOf(HasSubstr("ContextParallel: expected forward of the module itself ("),
                    HasSubstr("to call scaled_dot_product_attention, got none")));
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { way(1)(x_); }),
              HasSubstr("expected attention without attn_mask, or with is_causal, got a mask of "
                        "[6, 6]"));
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { way(2)(x_); }),
              HasSubstr("expected attention without dropout, got dropout_p = 0.5"));
}

TEST_F(ContextParallelErrors, ModulesThatTakeTheStyleOnceOrNotAtAll) {
  nn::Sequential net;
  net->push_back("own", Way(2));
  net->push_back("plain", torch::nn::Linear(4, 4));
  parallelize_module(net, mesh_, {{"own", ContextParallel()}});
  EXPECT_THAT(message_of([&] { parallelize_module(net, mesh_, {{"own", ContextParallel()}}); }),
              AllOf(HasSubstr("ContextParallel: "), HasSubstr("a module takes it once")));
  EXPECT_THAT(message_of([&] { parallelize_module(net, mesh_, {{"plain", ContextParallel()}}); }),
              AllOf(HasSubstr("ContextParallel expected 'plain' (torch::nn::LinearImpl) to be a "
                              "module whose calls can be hooked")));
}

TEST_F(ContextParallelErrors, MoreTokensThanPositions) {
  nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.head_dim = 8, .max_position = 16});
  parallelize_module(rotary, mesh_, ContextParallel());
  EXPECT_THAT(message_of([&] { rotary(x_); }),
              HasSubstr("ContextParallel: expected RotaryEmbedding to have positions for the whole "
                        "sequence, 4 ranks of 6 tokens, got 16; make it with more"));
  nn::Embedding places(16, 8);
  parallelize_module(places, mesh_, ContextParallel());
  EXPECT_THAT(message_of([&] { places(at::arange(6)); }),
              HasSubstr("4 ranks of 6 tokens, got 16; make it with more"));
  EXPECT_THAT(message_of([&] { places(at::zeros({1, 1, 2}, at::kLong)); }),
              HasSubstr("to get indices of [length] or [batch, length], got [1, 1, 2]"));
}

TEST(ContextParallelLengthsOnThreads, RanksWithOtherLengthsAreToldOnAll) {
  run_threads(2, [] {
    const auto mesh = mesh_of_all();
    const auto x = at::ones({1, 1, rank() == 0 ? 4 : 6, 8});
    EXPECT_THAT(
        message_of<c10::DistBackendError>([&] { ring_attention(x, x, x, {.mesh = mesh}); }),
        AllOf(HasSubstr("the ranks disagree"), HasSubstr("ring_attention, keys [1, 1, 4, 8]"),
              HasSubstr("ring_attention, keys [1, 1, 6, 8]")));
  });
}

}  // namespace
}  // namespace tessera::testing
