#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

Case like_case(const char* name, std::function<at::Tensor(const at::Tensor&)> function) {
  return {name, {{5, 4}}, [function](const Tensors& x) { return Tensors{function(x[0])}; }};
}

Case two(const char* name, Input left, Input right,
         std::function<at::Tensor(const Tensors&)> function) {
  return {name, {std::move(left), std::move(right)}, [function](const Tensors& x) {
            return Tensors{function(x)};
          }};
}

at::Tensor number(bool value) { return at::scalar_tensor(value ? 1 : 0); }

const Cases kLike(
    "like",
    {
        like_case("zeros_like", [](const at::Tensor& x) { return at::zeros_like(x) + x; }),
        like_case("ones_like", [](const at::Tensor& x) { return at::ones_like(x) * x; }),
        like_case("full_like", [](const at::Tensor& x) { return at::full_like(x, 3) * x; }),
        like_case("empty_like", [](const at::Tensor& x) { return at::empty_like(x).fill_(2) * x; }),
        like_case("new_zeros", [](const at::Tensor& x) { return x.new_zeros({5, 4}) + x; }),
        like_case("new_ones_of_other_size",
                  [](const at::Tensor& x) { return x.new_ones({3, 5, 1}) * x; }),
        like_case("new_full", [](const at::Tensor& x) { return x.new_full({5, 4}, 2) * x; }),
        like_case("new_empty", [](const at::Tensor& x) { return x.new_empty({4}).zero_() + x; }),
        like_case("new_empty_strided",
                  [](const at::Tensor& x) {
                    return x.new_empty_strided({5, 4}, {1, 5}).zero_() + x;
                  }),
        like_case("to_double", [](const at::Tensor& x) { return x.to(at::kDouble) * 2; }),
        {"to_int",
         {{5, 4}},
         [](const Tensors& x) { return Tensors{(x[0] * 8).to(at::kInt), x[0].to(at::kBool)}; },
         /*backward=*/false},
        {"to_lower",
         {{5, 4}},
         [](const Tensors& x) { return Tensors{x[0].to(at::kBFloat16).to(at::kFloat)}; },
         /*backward=*/true,
         /*tolerance=*/2e-2},
        like_case("clone_contiguous", [](const at::Tensor& x) { return x.t().contiguous(); }),
        like_case("again",
                  [](const at::Tensor& x) {
                    static const auto kAgain = c10::Dispatcher::singleton()
                                                   .findSchemaOrThrow("tessera::again", "")
                                                   .typed<at::Tensor(const at::Tensor&)>();
                    return kAgain.call(x.detach()) * x;
                  }),
        like_case("zero_in_place", [](const at::Tensor& x) { return x.clone().zero_() + x; }),
        like_case("fill_in_place", [](const at::Tensor& x) { return x.clone().fill_(3) * x; }),
        like_case("fill_by_tensor",
                  [](const at::Tensor& x) { return x.clone().fill_(x.sum().detach()) * x; }),
        like_case("fill", [](const at::Tensor& x) { return at::fill(x, 3) * x; }),
        two("copy", {5, 4}, {5, 4},
            [](const Tensors& x) { return at::zeros_like(x[0]).copy_(x[1]) * x[0]; }),
        two("copy_broadcast", {5, 4}, {4},
            [](const Tensors& x) { return at::zeros_like(x[0]).copy_(x[1]) * x[0]; }),
        two("copy_to_double", {5, 4}, {5, 1},
            [](const Tensors& x) { return at::zeros_like(x[0], at::kDouble).copy_(x[1]) + x[0]; }),
        {"copy_to_pending",
         {{5, 4}},
         [](const Tensors& x) { return Tensors{x[0].clone().copy_(x[0].sum(1, true).detach())}; },
         /*backward=*/false},
        two("equal", {5, 4}, {5, 4},
            [](const Tensors& x) {
              return number(x[0].equal(x[0])) + 2 * number(x[0].equal(x[1])) +
                     4 * number(x[0].equal(x[1].t()));
            }),
        two("is_same_size", {5, 4}, {5, 1},
            [](const Tensors& x) {
              return number(at::is_same_size(x[0], x[0])) +
                     2 * number(at::is_same_size(x[0], x[1]));
            }),
        like_case("item",
                  [](const at::Tensor& x) { return at::scalar_tensor(x.sum().item<double>()); }),
    });

}  // namespace
}  // namespace tessera::brute_force
