// Bits that say "conjugate" or "negative" of memory that holds something else.
#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

at::Tensor complex_numbers() { return torch::view_as_complex(numbered({6, 3, 2})); }

TEST(ConjugateOnThreads, CollectivesSendWhatIsMeant) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = complex_numbers();
    for (const auto& placement : {Shard(0), Shard(1), Partial()}) {
      const auto tensor = placed(whole, mesh, {placement});
      const auto label = c10::str(placement);
      expect_equal(full_of(tensor.conj()), whole.conj().resolve_conj(), label);
      expect_equal(full_of(tensor.mH()), whole.mH().resolve_conj(), label);
      expect_equal(full_of(torch::real(tensor.conj())), torch::real(whole), label);
      expect_equal(full_of(torch::imag(tensor.conj())), torch::imag(whole).neg(), label);
      expect_equal(full_of(torch::_neg_view(torch::real(tensor))), torch::real(whole).neg(), label);
    }
  });
}

TEST(ConjugateOnThreads, LocalTensorsMayBeConjugates) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = complex_numbers();
    const auto expected = whole.conj().resolve_conj();
    const auto half = whole.narrow(0, 3 * mesh.local_rank(), 3).conj();
    const auto tensor = DTensor::from_local(half, mesh, {Shard(0)});
    expect_equal(full_of(tensor), expected);
    expect_equal(full_of(torch::view_as_real(tensor)), torch::view_as_real(expected));
    expect_equal(full_of(DTensor::from_local(whole.conj(), mesh, {}, {.run_check = true})),
                 expected);
    expect_equal(full_of(distribute_tensor(whole.conj(), mesh, {Shard(0)})), expected);
    expect_equal(full_of(distribute_tensor(whole.conj(), mesh, {Shard(1)}, std::nullopt)),
                 expected);
  });
}

TEST(ConjugateOnThreads, GradientsOfLocalTensorsMayBeConjugates) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto loss = [](const at::Tensor& z, const at::Tensor& w) {
      return torch::real(z.conj() * w).sum();
    };
    const auto plain = complex_numbers().requires_grad_();
    const auto weights = complex_numbers().flip(0);
    loss(plain, weights).backward();
    auto leaf = placed(complex_numbers(), mesh, {Shard(0)});
    leaf.requires_grad_();
    loss(leaf.to_local(), weights.narrow(0, 3 * mesh.local_rank(), 3)).backward();
    expect_equal(full_of(torch::view_as_real(leaf.grad())),
                 torch::view_as_real(plain.grad().resolve_conj()));
  });
}

TEST(ConjugateOnThreads, WritingIntoOneIsRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto tensor = placed(complex_numbers(), mesh, {Shard(0)});
    auto view = tensor.conj();
    EXPECT_THAT(message_of<c10::Error>([&] { view.mul_(2); }),
                ::testing::HasSubstr("would not reach its base"));
  });
}

}  // namespace
}  // namespace tessera::testing
