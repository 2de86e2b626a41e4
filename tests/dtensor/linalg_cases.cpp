#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

using Function = std::function<at::Tensor(const Tensors&)>;

Case one(const char* name, std::vector<Input> inputs, Function function, bool backward = true) {
  return {name, std::move(inputs), [function](const Tensors& x) { return Tensors{function(x)}; },
          backward, 5e-3};
}

Case several(const char* name, std::vector<Input> inputs,
             std::function<Tensors(const Tensors&)> function, bool backward = true) {
  return {name, std::move(inputs), std::move(function), backward, 5e-3};
}

/// [..., n, 8] -> [..., n, n], positive definite and well conditioned.
at::Tensor definite(const at::Tensor& x) { return x.matmul(x.mT()); }

const Cases kSolvers(
    "linalg",
    {
        one("cholesky", {{5, 3, 8}},
            [](const Tensors& x) { return at::linalg_cholesky(definite(x[0])); }),
        one("cholesky_old", {{5, 3, 8}},
            [](const Tensors& x) { return definite(x[0]).cholesky(); }),
        one(
            "cholesky_inverse", {{5, 3, 3}},
            [](const Tensors& x) { return (x[0].tril() + 4).tril().cholesky_inverse(); }, false),
        one(
            "cholesky_solve_helper", {{5, 3, 2}, {5, 3, 3}},
            [](const Tensors& x) {
              return at::_cholesky_solve_helper(x[0], (x[1].tril() + 4).tril(), false);
            },
            false),
        one("cholesky_solve", {{5, 3, 2}, {5, 3, 3}},
            [](const Tensors& x) { return x[0].cholesky_solve((x[1].tril() + 4).tril()); }),
        one("inverse", {{5, 3, 8}}, [](const Tensors& x) { return definite(x[0]).inverse(); }),
        one("inverse_one", {{3, 8}}, [](const Tensors& x) { return definite(x[0]).inverse(); }),
        one("solve", {{5, 3, 8}, {5, 3, 2}},
            [](const Tensors& x) { return at::linalg_solve(definite(x[0]), x[1]); }),
        one("solve_vectors", {{5, 3, 8}, {5, 3}},
            [](const Tensors& x) { return at::linalg_solve(definite(x[0]), x[1]); }),
        one("solve_broadcast", {{3, 8}, {5, 3, 2}},
            [](const Tensors& x) { return at::linalg_solve(definite(x[0]), x[1]); }),
        one("solve_triangular", {{5, 3, 3}, {5, 3, 2}},
            [](const Tensors& x) {
              return at::linalg_solve_triangular((x[0].triu() + 4).triu(), x[1], true);
            }),
        several("triangular_solve", {{5, 3, 2}, {5, 3, 3}},
                [](const Tensors& x) {
                  return Tensors{std::get<0>(x[0].triangular_solve((x[1].triu() + 4).triu()))};
                }),
        one("det", {{5, 3, 8}}, [](const Tensors& x) { return definite(x[0]).det(); }),
        several("slogdet", {{5, 3, 8}},
                [](const Tensors& x) {
                  return Tensors{std::get<1>(at::linalg_slogdet(definite(x[0])))};
                }),
        one("pinv", {{5, 3, 4}}, [](const Tensors& x) { return at::linalg_pinv(x[0], 1e-6); }),
        one(
            "matrix_exp", {{5, 3, 3}}, [](const Tensors& x) { return x[0].matrix_exp(); }, false),
        one("matrix_power", {{5, 3, 3}}, [](const Tensors& x) { return x[0].matrix_power(3); }),
    });

const Cases kFactors(
    "linalg",
    {
        several("svd", {{5, 3, 4}},
                [](const Tensors& x) {
                  const auto [u, s, v] = at::linalg_svd(x[0], false);
                  return Tensors{s, u.abs(), v.abs()};
                }),
        one("svdvals", {{5, 3, 4}}, [](const Tensors& x) { return at::linalg_svdvals(x[0]); }),
        several("eigh", {{5, 3, 8}},
                [](const Tensors& x) {
                  const auto [values, vectors] = at::linalg_eigh(definite(x[0]));
                  return Tensors{values, vectors.abs()};
                }),
        one("eigvalsh", {{5, 3, 8}},
            [](const Tensors& x) { return at::linalg_eigvalsh(definite(x[0])); }),
        one(
            "eigvals", {{5, 3, 8}},
            [](const Tensors& x) { return at::real(at::linalg_eigvals(definite(x[0]))); }, false),
        several(
            "eig", {{5, 3, 8}},
            [](const Tensors& x) {
              return Tensors{at::real(std::get<0>(at::linalg_eig(definite(x[0]))))};
            },
            false),
        several("qr", {{5, 4, 3}},
                [](const Tensors& x) {
                  const auto [q, r] = at::linalg_qr(x[0]);
                  return Tensors{q, r};
                }),
        several(
            "qr_r", {{5, 4, 3}},
            [](const Tensors& x) { return Tensors{std::get<1>(at::linalg_qr(x[0], "r"))}; }, false),
        several(
            "geqrf", {{5, 4, 3}},
            [](const Tensors& x) {
              const auto [a, tau] = x[0].geqrf();
              return Tensors{a, tau, at::linalg_householder_product(a, tau),
                             at::ormqr(a, tau, x[0])};
            },
            false),
        several("lu", {{5, 3, 3}},
                [](const Tensors& x) {
                  const auto [p, l, u] = at::linalg_lu(x[0]);
                  return Tensors{p, l, u};
                }),
        several("lu_factor", {{5, 3, 3}, {5, 3, 2}},
                [](const Tensors& x) {
                  const auto [lu, pivots] = at::linalg_lu_factor(x[0]);
                  const auto [p, l, u] = at::lu_unpack(lu, pivots);
                  return Tensors{lu, at::linalg_lu_solve(lu, pivots, x[1]), p, l, u};
                }),
        several(
            "ldl", {{5, 3, 8}, {5, 3, 2}},
            [](const Tensors& x) {
              const auto [ld, pivots] = at::linalg_ldl_factor(definite(x[0]));
              return Tensors{ld, at::linalg_ldl_solve(ld, pivots, x[1])};
            },
            false),
    });

const Cases kProducts(
    "linalg",
    {
        one("addr", {{5, 4}, {5}, {4}},
            [](const Tensors& x) { return at::addr(x[0], x[1], x[2], 0.5, 2); }),
        one("addr_broadcast", {{4}, {5}, {4}},
            [](const Tensors& x) { return at::addr(x[0], x[1], x[2]); }),
        one("outer", {{5}, {4}}, [](const Tensors& x) { return at::outer(x[0], x[1]); }),
        one("addmv", {{5}, {5, 4}, {4}},
            [](const Tensors& x) { return at::addmv(x[0], x[1], x[2], 0.5, 2); }),
        one("addbmm", {{4, 2}, {5, 4, 3}, {5, 3, 2}},
            [](const Tensors& x) { return at::addbmm(x[0], x[1], x[2], 0.5, 2); }),
        one("addbmm_broadcast", {{2}, {5, 4, 3}, {5, 3, 2}},
            [](const Tensors& x) { return at::addbmm(x[0], x[1], x[2]); }),
        one(
            "addmm_activation", {{2}, {5, 3}, {3, 2}},
            [](const Tensors& x) { return at::_addmm_activation(x[0], x[1], x[2]); }, false),
        one("cross", {{5, 3, 2}, {5, 3, 2}},
            [](const Tensors& x) { return at::linalg_cross(x[0], x[1], 1); }),
        one("cdist", {{3, 5, 2}, {3, 4, 2}},
            [](const Tensors& x) { return at::cdist(x[0], x[1], 1.5); }),
        one("cdist_euclidean", {{5, 3}, {4, 3}},
            [](const Tensors& x) { return at::cdist(x[0], x[1]); }),
        one("cdist_product", {{5, 3}, {4, 3}},
            [](const Tensors& x) { return at::cdist(x[0], x[1], 2, 1); }),
        one("glu", {{5, 3, 4}}, [](const Tensors& x) { return at::glu(x[0], 2); }),
        one("glu_inner", {{5, 4, 3}}, [](const Tensors& x) { return at::glu(x[0], 1); }),
        one("fft", {{5, 4, 3}},
            [](const Tensors& x) { return at::view_as_real(at::fft_fft(x[0], {}, 1)); }),
        one("rfft", {{5, 4, 3}},
            [](const Tensors& x) { return at::view_as_real(at::fft_rfft(x[0], {}, 0)); }),
        one("irfft", {{5, 4, 3}},
            [](const Tensors& x) { return at::fft_irfft(at::fft_rfft(x[0], {}, 1), 4, 1); }),
        one("fft2", {{5, 4, 3}},
            [](const Tensors& x) { return at::view_as_real(at::fft_fft2(x[0])); }),
    });

}  // namespace
}  // namespace tessera::brute_force
