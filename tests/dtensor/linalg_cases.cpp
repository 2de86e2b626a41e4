#include "base/torch_versions.h"
#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

Case linalg_case(const char* name, std::vector<Input> inputs, OfSeveral function,
                 bool backward = true) {
  return {name, std::move(inputs), [function](const Tensors& x) { return Tensors{function(x)}; },
          backward, 5e-3};
}

Case linalg_results(const char* name, std::vector<Input> inputs,
                    std::function<Tensors(const Tensors&)> function, bool backward = true) {
  return {name, std::move(inputs), std::move(function), backward, 5e-3};
}

/// [..., n, 8] -> [..., n, n], positive definite and well conditioned.
at::Tensor definite(const at::Tensor& x) { return x.matmul(x.mT()); }

const Cases kSolvers(
    "linalg",
    {
        linalg_case("cholesky", {{5, 3, 8}},
                    [](const Tensors& x) { return at::linalg_cholesky(definite(x[0])); }),
        linalg_case("cholesky_old", {{5, 3, 8}},
                    [](const Tensors& x) { return tessera::cholesky(definite(x[0])); }),
        linalg_case(
            "cholesky_inverse", {{5, 3, 3}},
            [](const Tensors& x) { return (x[0].tril() + 4).tril().cholesky_inverse(); }, false),
        linalg_case(
            "cholesky_solve_helper", {{5, 3, 2}, {5, 3, 3}},
            [](const Tensors& x) {
              return at::_cholesky_solve_helper(x[0], (x[1].tril() + 4).tril(), false);
            },
            false),
        linalg_case("cholesky_solve", {{5, 3, 2}, {5, 3, 3}},
                    [](const Tensors& x) { return x[0].cholesky_solve((x[1].tril() + 4).tril()); }),
        linalg_case("inverse", {{5, 3, 8}},
                    [](const Tensors& x) { return definite(x[0]).inverse(); }),
        linalg_case("inverse_one", {{3, 8}},
                    [](const Tensors& x) { return definite(x[0]).inverse(); }),
        linalg_case("solve", {{5, 3, 8}, {5, 3, 2}},
                    [](const Tensors& x) { return at::linalg_solve(definite(x[0]), x[1]); }),
        linalg_case("solve_vectors", {{5, 3, 8}, {5, 3}},
                    [](const Tensors& x) { return at::linalg_solve(definite(x[0]), x[1]); }),
        linalg_case("solve_broadcast", {{3, 8}, {5, 3, 2}},
                    [](const Tensors& x) { return at::linalg_solve(definite(x[0]), x[1]); }),
        linalg_case("solve_triangular", {{5, 3, 3}, {5, 3, 2}},
                    [](const Tensors& x) {
                      return at::linalg_solve_triangular((x[0].triu() + 4).triu(), x[1], true);
                    }),
        linalg_results("triangular_solve", {{5, 3, 2}, {5, 3, 3}},
                       [](const Tensors& x) {
                         return Tensors{
                             std::get<0>(x[0].triangular_solve((x[1].triu() + 4).triu()))};
                       }),
        linalg_case("det", {{5, 3, 8}}, [](const Tensors& x) { return definite(x[0]).det(); }),
        linalg_results("slogdet", {{5, 3, 8}},
                       [](const Tensors& x) {
                         return Tensors{std::get<1>(at::linalg_slogdet(definite(x[0])))};
                       }),
        linalg_case("pinv", {{5, 3, 4}},
                    [](const Tensors& x) { return at::linalg_pinv(x[0], 1e-6); }),
        linalg_case(
            "matrix_exp", {{5, 3, 3}}, [](const Tensors& x) { return x[0].matrix_exp(); }, false),
        linalg_case("matrix_power", {{5, 3, 3}},
                    [](const Tensors& x) { return x[0].matrix_power(3); }),
    });

const Cases kFactors(
    "linalg",
    {
        linalg_results("svd", {{5, 3, 4}},
                       [](const Tensors& x) {
                         const auto [u, s, v] = at::linalg_svd(x[0], false);
                         return Tensors{s, u.abs(), v.abs()};
                       }),
        linalg_case("svdvals", {{5, 3, 4}},
                    [](const Tensors& x) { return at::linalg_svdvals(x[0]); }),
        linalg_results("eigh", {{5, 3, 8}},
                       [](const Tensors& x) {
                         const auto [values, vectors] = at::linalg_eigh(definite(x[0]));
                         return Tensors{values, vectors.abs()};
                       }),
        linalg_case("eigvalsh", {{5, 3, 8}},
                    [](const Tensors& x) { return at::linalg_eigvalsh(definite(x[0])); }),
        linalg_case(
            "eigvals", {{5, 3, 8}},
            [](const Tensors& x) { return at::real(at::linalg_eigvals(definite(x[0]))); }, false),
        linalg_results(
            "eig", {{5, 3, 8}},
            [](const Tensors& x) {
              return Tensors{at::real(std::get<0>(at::linalg_eig(definite(x[0]))))};
            },
            false),
        linalg_results("qr", {{5, 4, 3}},
                       [](const Tensors& x) {
                         const auto [q, r] = at::linalg_qr(x[0]);
                         return Tensors{q, r};
                       }),
        linalg_results(
            "qr_r", {{5, 4, 3}},
            [](const Tensors& x) { return Tensors{std::get<1>(at::linalg_qr(x[0], "r"))}; }, false),
        linalg_results(
            "geqrf", {{5, 4, 3}},
            [](const Tensors& x) {
              const auto [a, tau] = x[0].geqrf();
              return Tensors{a, tau, at::linalg_householder_product(a, tau),
                             at::ormqr(a, tau, x[0])};
            },
            false),
        linalg_results("lu", {{5, 3, 3}},
                       [](const Tensors& x) {
                         const auto [p, l, u] = at::linalg_lu(x[0]);
                         return Tensors{p, l, u};
                       }),
        linalg_results("lu_factor", {{5, 3, 3}, {5, 3, 2}},
                       [](const Tensors& x) {
                         const auto [lu, pivots] = at::linalg_lu_factor(x[0]);
                         const auto [p, l, u] = at::lu_unpack(lu, pivots);
                         return Tensors{lu, at::linalg_lu_solve(lu, pivots, x[1]), p, l, u};
                       }),
        linalg_results(
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
        linalg_case("addr", {{5, 4}, {5}, {4}},
                    [](const Tensors& x) { return at::addr(x[0], x[1], x[2], 0.5, 2); }),
        linalg_case("addr_broadcast", {{4}, {5}, {4}},
                    [](const Tensors& x) { return at::addr(x[0], x[1], x[2]); }),
        linalg_case("outer", {{5}, {4}}, [](const Tensors& x) { return at::outer(x[0], x[1]); }),
        linalg_case("addmv", {{5}, {5, 4}, {4}},
                    [](const Tensors& x) { return at::addmv(x[0], x[1], x[2], 0.5, 2); }),
        linalg_case("addbmm", {{4, 2}, {5, 4, 3}, {5, 3, 2}},
                    [](const Tensors& x) { return at::addbmm(x[0], x[1], x[2], 0.5, 2); }),
        linalg_case("addbmm_broadcast", {{2}, {5, 4, 3}, {5, 3, 2}},
                    [](const Tensors& x) { return at::addbmm(x[0], x[1], x[2]); }),
        linalg_case(
            "addmm_activation", {{2}, {5, 3}, {3, 2}},
            [](const Tensors& x) { return at::_addmm_activation(x[0], x[1], x[2]); }, false),
        linalg_case("cross", {{5, 3, 2}, {5, 3, 2}},
                    [](const Tensors& x) { return at::linalg_cross(x[0], x[1], 1); }),
        linalg_case("cdist", {{3, 5, 2}, {3, 4, 2}},
                    [](const Tensors& x) { return at::cdist(x[0], x[1], 1.5); }),
        linalg_case("cdist_euclidean", {{5, 3}, {4, 3}},
                    [](const Tensors& x) { return at::cdist(x[0], x[1]); }),
        linalg_case("cdist_product", {{5, 3}, {4, 3}},
                    [](const Tensors& x) { return at::cdist(x[0], x[1], 2, 1); }),
        linalg_case("glu", {{5, 3, 4}}, [](const Tensors& x) { return at::glu(x[0], 2); }),
        linalg_case("glu_inner", {{5, 4, 3}}, [](const Tensors& x) { return at::glu(x[0], 1); }),
        linalg_case("fft", {{5, 4, 3}},
                    [](const Tensors& x) { return at::view_as_real(at::fft_fft(x[0], {}, 1)); }),
        linalg_case("rfft", {{5, 4, 3}},
                    [](const Tensors& x) { return at::view_as_real(at::fft_rfft(x[0], {}, 0)); }),
        linalg_case("irfft", {{5, 4, 3}},
                    [](const Tensors& x) {
                      return at::fft_irfft(at::fft_rfft(x[0], {}, 1), 4, 1);
                    }),
        linalg_case("fft2", {{5, 4, 3}},
                    [](const Tensors& x) { return at::view_as_real(at::fft_fft2(x[0])); }),
    });

}  // namespace
}  // namespace tessera::brute_force
