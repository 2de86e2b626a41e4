// SyncBatchNorm: ranks with their rows compute what one process computes on all.
#include "replicate/averages.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

struct NormedImpl : torch::nn::Module {
  nn::Linear in{5, 6}, out{6, 2};
  nn::BatchNorm1d norm;
  explicit NormedImpl(torch::nn::BatchNormOptions options = {6}) : norm(options) {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return out(norm(in(x)).tanh()); }
};
TESSERA_MODULE(Normed);

/// Rank r has r + 2 rows of the batch.
struct Share {
  int64_t first = 0, rows = 0, all = 0;
  Share() {
    for (int each = 0; each < world_size(); ++each) {
      if (each == rank()) first = all;
      all += each + 2;
    }
    rows = rank() + 2;
  }
};

void expect_exact(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(at::allclose(actual, expected, 1e-12, 1e-12)) << what;
}

class SyncBatchNormOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OnThreads, SyncBatchNormOf, ::testing::Values(2, 3));

const torch::nn::BatchNormOptions kKinds[] = {
    torch::nn::BatchNormOptions(6), torch::nn::BatchNormOptions(6).momentum(std::nullopt),
    torch::nn::BatchNormOptions(6).affine(false),
    torch::nn::BatchNormOptions(6).track_running_stats(false)};

TEST_P(SyncBatchNormOf, TrainsLikeOneProcessOnAllRows) {
  run_threads(GetParam(), [] {
    for (const auto& kind : kKinds) {
      auto [whole, net] = twins<Normed>(3, kind);
      convert_sync_batchnorm(net);
      replicate(net);
      const Share share;
      torch::optim::SGD expected(whole->parameters(), 0.1), optimizer(net->parameters(), 0.1);
      for (uint64_t step = 0; step < 4; ++step) {
        // A large mean, which squares of the values would drown in.
        const auto x = drawn_on_device({share.all, 5}, step).to(torch::kDouble) * 3 + 10;
        auto own = x.narrow(0, share.first, share.rows).clone().requires_grad_();
        auto all = x.clone().requires_grad_();
        expected.zero_grad();
        optimizer.zero_grad();
        const auto reference = whole(all);
        (reference.pow(2).sum() / world_size()).backward();  // the ranks' mean of sums
        const auto result = net(own);
        result.pow(2).sum().backward();
        expect_exact(result, reference.narrow(0, share.first, share.rows), "result");
        expect_exact(own.grad(), all.grad().narrow(0, share.first, share.rows) * world_size(),
                     "gradient of the input");
        const auto parameters = whole->named_parameters();
        for (const auto& item : net->named_parameters())
          expect_exact(item.value().grad(), parameters[item.key()].grad(), item.key());
        expected.step();
        optimizer.step();
      }
      const auto buffers = whole->named_buffers();
      for (const auto& item : net->named_buffers()) {
        if (item.value().defined())
          expect_exact(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble),
                       item.key());
      }
      whole->eval();
      net->eval();
      const auto x = drawn_on_device({3, 5}, 9).to(torch::kDouble);
      if (kind.track_running_stats()) expect_exact(net(x), whole(x), "eval");
    }
  });
}

TEST_P(SyncBatchNormOf, TakesImagesAndIsAModule) {
  run_threads(GetParam(), [] {
    nn::BatchNorm2d plain(3);
    plain->to(torch::kDouble);
    nn::SyncBatchNorm norm(3);
    norm->to(torch::kDouble);
    nn::BatchNorm2d converted(3);
    converted->to(torch::kDouble);
    convert_sync_batchnorm(converted);
    const Share share;
    const auto x = drawn_on_device({share.all, 3, 4, 5}, 1).to(torch::kDouble);
    const auto expected = plain(x).narrow(0, share.first, share.rows);
    const auto own = x.narrow(0, share.first, share.rows);
    expect_exact(norm(own), expected, "SyncBatchNorm");
    expect_exact(converted(own), expected, "converted");
    expect_exact(norm->running_var, plain->running_var, "running_var");
    EXPECT_EQ(norm->named_parameters().keys(), plain->named_parameters().keys());
  });
}

TEST(SyncBatchNormOnThreads, OfASubgroupIsOfItsRanksAlone) {
  run_threads(3, [] {
    const auto pair = rank() < 2 ? new_group({0, 1}) : Group();
    nn::BatchNorm1d norm(2);
    if (rank() < 2) convert_sync_batchnorm(norm, pair);
    const auto x = torch::full({4, 2}, static_cast<double>(rank()), torch::kFloat);
    norm(x);
    EXPECT_NEAR(norm->running_mean[0].item<float>(), rank() < 2 ? 0.05 : 0.2, 1e-6);
  });
}

TEST(SyncBatchNormErrors, ModulesThatCantBeHookedAndOtherInputs) {
  run_threads(1, [] {
    torch::nn::Sequential plain(torch::nn::BatchNorm1d(4));
    EXPECT_THAT(message_of<c10::ValueError>([&] { convert_sync_batchnorm(plain); }),
                ::testing::HasSubstr("convert_sync_batchnorm: expected a module whose calls"));
    nn::SyncBatchNorm norm(3);
    EXPECT_THAT(message_of<c10::ValueError>([&] { norm(torch::ones({2, 4})); }),
                ::testing::HasSubstr("expected an input of [rows, 3, ...]"));
  });
}

}  // namespace
}  // namespace tessera::testing
