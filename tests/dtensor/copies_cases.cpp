// Operators that hand a tensor through, and the forms of views that copy.
#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

Case copy_case(const char* name, OfOne function, Input input = {5, 4}) {
  return {
      name, {std::move(input)}, [function](const Tensors& x) { return Tensors{function(x[0])}; }};
}

const Cases kAliases(
    "copies",
    {
        copy_case("alias", [](const at::Tensor& x) { return at::alias(x); }),
        copy_case("positive", [](const at::Tensor& x) { return at::positive(x) * 2; }),
        copy_case("lift", [](const at::Tensor& x) { return at::lift(x * 2); }),
        forward_only(copy_case("lift_fresh",
                               [](const at::Tensor& x) { return at::lift_fresh(x.detach()); })),
        copy_case("alias_copy", [](const at::Tensor& x) { return at::alias_copy(x); }),
        forward_only(copy_case("detach_copy",
                               [](const at::Tensor& x) { return at::detach_copy(x); })),
        forward_only({"copy",
                      {{5, 4}, {4}},
                      [](const Tensors& x) { return Tensors{at::copy(x[0], x[1]) + x[0]}; }}),
        {"fill_tensor",
         {{5, 4}, {}},
         [](const Tensors& x) { return Tensors{at::fill(x[0], x[1]) + x[0]}; }},
        forward_only(copy_case("zero", [](const at::Tensor& x) { return at::zero(x) + x; })),
    });

const Cases kViewCopies(
    "copies",
    {
        // libtorch 2.11 has no derivative for it.
        forward_only(copy_case("narrow_copy",
                               [](const at::Tensor& x) { return at::narrow_copy(x, 1, 1, 2); })),
        {"split_with_sizes_copy",
         {{5, 4}},
         [](const Tensors& x) { return at::split_with_sizes_copy(x[0], {2, 3}, 0); }},
        {"unsafe_split_with_sizes",
         {{5, 4}},
         [](const Tensors& x) { return at::unsafe_split_with_sizes(x[0], {1, 3}, 1); }},
        forward_only(copy_case("view_copy_dtype",
                               [](const at::Tensor& x) { return at::view_copy(x, at::kInt); })),
        // Their derivatives place numbers in memory, which a distributed tensor refuses.
        forward_only(copy_case("as_strided",
                               [](const at::Tensor& x) { return x.as_strided({3, 4}, {4, 1}); })),
        forward_only(copy_case("as_strided_copy",
                               [](const at::Tensor& x) {
                                 return at::as_strided_copy(x, {4, 5}, {1, 4});
                               })),
        {"as_strided_scatter",
         {{5, 4}, {3, 2}},
         [](const Tensors& x) {
           return Tensors{at::as_strided_scatter(x[0], x[1], {3, 2}, {4, 1})};
         }},
    });

/// Complex numbers with these real and imaginary parts.
at::Tensor complex(const at::Tensor& x) { return at::view_as_complex(x.contiguous()); }

const Cases kComplex(
    "copies",
    {
        copy_case("real", [](const at::Tensor& x) { return at::real(complex(x)) * 2; }, {5, 3, 2}),
        copy_case("imag", [](const at::Tensor& x) { return at::imag(complex(x)) * 2; }, {5, 3, 2}),
        copy_case("conj",
                  [](const at::Tensor& x) { return at::view_as_real(at::_conj(complex(x)) * 2); },
                  {5, 3, 2}),
        copy_case("conj alone",
                  [](const at::Tensor& x) {
                    return at::view_as_real(complex(x).conj().resolve_conj());
                  },
                  {5, 3, 2}),
        copy_case("neg_view", [](const at::Tensor& x) { return at::_neg_view(x).resolve_neg(); },
                  {5, 3}),
        forward_only(copy_case("neg_view itself",
                               [](const at::Tensor& x) { return at::_neg_view(x); }, {5, 3})),
        forward_only(copy_case("view_as_complex_copy",
                               [](const at::Tensor& x) {
                                 return at::view_as_real(at::view_as_complex_copy(x));
                               },
                               {5, 3, 2})),
        copy_case("view_as_real_copy",
                  [](const at::Tensor& x) { return at::view_as_real_copy(complex(x)); }, {5, 3, 2}),
        {"vdot", {{7}, {7}}, [](const Tensors& x) { return Tensors{at::vdot(x[0], x[1])}; }},
    });

}  // namespace
}  // namespace tessera::brute_force
