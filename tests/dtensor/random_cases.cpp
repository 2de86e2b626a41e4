// Draws from a generator that every rank seeds alike must be those of one device; of draws from the
// default one, which threads share, what can be said of any draw.
#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

Case fill(const char* name, std::function<void(at::Tensor&, at::Generator)> draw) {
  return {name,
          {{5, 4}},
          [draw](const Tensors& x) {
            auto target = at::zeros_like(x[0]);
            draw(target, at::make_generator<at::CPUGeneratorImpl>(7));
            return Tensors{target};
          },
          /*backward=*/false};
}

/// Everything that is drawn lies in [low, high).
Case like(const char* name, double low, double high,
          std::function<at::Tensor(const at::Tensor&)> draw) {
  return {name,
          {{5, 4}},
          [=](const Tensors& x) {
            const auto drawn = draw(x[0]);
            return Tensors{drawn.ge(low).logical_and(drawn.lt(high)), at::zeros_like(drawn)};
          },
          /*backward=*/false};
}

const Cases kFills(
    "random",
    {
        fill("uniform", [](at::Tensor& x, at::Generator draws) { x.uniform_(-1, 1, draws); }),
        fill("normal", [](at::Tensor& x, at::Generator draws) { x.normal_(1, 2, draws); }),
        fill("random", [](at::Tensor& x, at::Generator draws) { x.random_(draws); }),
        fill("random_to", [](at::Tensor& x, at::Generator draws) { x.random_(9, draws); }),
        fill("random_from", [](at::Tensor& x, at::Generator draws) { x.random_(3, 9, draws); }),
        fill("bernoulli", [](at::Tensor& x, at::Generator draws) { x.bernoulli_(0.3, draws); }),
        fill("exponential", [](at::Tensor& x, at::Generator draws) { x.exponential_(2, draws); }),
        fill("log_normal", [](at::Tensor& x, at::Generator draws) { x.log_normal_(1, 2, draws); }),
        fill("geometric", [](at::Tensor& x, at::Generator draws) { x.geometric_(0.3, draws); }),
        fill("cauchy", [](at::Tensor& x, at::Generator draws) { x.cauchy_(0, 1, draws); }),
    });

const Cases kRandomLike(
    "random",
    {
        like("rand_like", 0, 1, [](const at::Tensor& x) { return at::rand_like(x); }),
        like("randn_like", -9, 9, [](const at::Tensor& x) { return at::randn_like(x); }),
        like("randint_like", 0, 3, [](const at::Tensor& x) { return at::randint_like(x, 3); }),
        like("randint_like_from", 2, 5,
             [](const at::Tensor& x) { return at::randint_like(x, 2, 5); }),
    });

// What is left is scaled, the rest is zero, and so is it with the gradient.
const Cases kDropout("random",
                     {
                         {"native_dropout",
                          {{5, 4}},
                          [](const Tensors& x) {
                            const auto [output, mask] = at::native_dropout(x[0], 0.5, true);
                            return Tensors{output - x[0] * mask * 2};
                          }},
                         {"native_dropout_at_rest",
                          {{5, 4}},
                          [](const Tensors& x) {
                            const auto [output, mask] = at::native_dropout(x[0], 0.5, false);
                            return Tensors{output, mask};
                          }},
                     });

}  // namespace
}  // namespace tessera::brute_force
