#include "dtensor/brute_force.h"

#include <torch/torch.h>

namespace tessera::brute_force {
namespace {

constexpr std::pair<const char*, int64_t> kLossReductions[] = {
    {"none", at::Reduction::None}, {"mean", at::Reduction::Mean}, {"sum", at::Reduction::Sum}};

using Loss = std::function<at::Tensor(const Tensors& inputs, int64_t reduction)>;

/// The loss with every reduction.
void add(std::vector<Case>& cases, const std::string& name, const std::vector<Input>& inputs,
         const Loss& loss) {
  for (const auto& [text, reduction] : kLossReductions) {
    cases.push_back(
        {name + '_' + text, inputs, [=](const Tensors& x) { return Tensors{loss(x, reduction)}; }});
  }
}

std::vector<Case> elementwise_losses() {
  std::vector<Case> cases;
  const auto add_pair = [&](const char* name, const Loss& loss) {
    add(cases, name, {{5, 4}, {5, 4}}, loss);
  };
  add_pair("mse", [](const Tensors& x, int64_t r) { return at::mse_loss(x[0], x[1], r); });
  add_pair("l1", [](const Tensors& x, int64_t r) { return at::l1_loss(x[0], x[1], r); });
  add_pair("smooth_l1",
           [](const Tensors& x, int64_t r) { return at::smooth_l1_loss(x[0], x[1], r, 0.5); });
  add_pair("huber", [](const Tensors& x, int64_t r) { return at::huber_loss(x[0], x[1], r, 0.7); });
  add_pair("soft_margin", [](const Tensors& x, int64_t r) {
    return at::soft_margin_loss(x[0], x[1].detach().sign(), r);
  });
  add_pair("kl_div", [](const Tensors& x, int64_t r) { return at::kl_div(x[0], x[1], r, true); });
  add_pair("poisson_nll", [](const Tensors& x, int64_t r) {
    return at::poisson_nll_loss(x[0], x[1], true, false, 1e-8, r);
  });
  add(cases, "mse_few", {{2, 1}, {2, 1}},
      [](const Tensors& x, int64_t r) { return at::mse_loss(x[0], x[1], r); });
  add(cases, "bce", {unit({5, 4}), unit({5, 4}), positive({4})}, [](const Tensors& x, int64_t r) {
    return at::binary_cross_entropy(x[0], x[1].detach(), x[2].detach(), r);
  });
  add(cases, "bce_with_logits", {{5, 4}, unit({5, 4}), positive({4})},
      [](const Tensors& x, int64_t r) {
        return at::binary_cross_entropy_with_logits(x[0], x[1], {}, x[2].detach(), r);
      });
  add(cases, "multi_margin", {{5, 4}, index({5}, 4), positive({4})},
      [](const Tensors& x, int64_t r) {
        return at::multi_margin_loss(x[0], x[1], 1, 1, x[2].detach(), r);
      });
  add(cases, "multilabel_margin", {{5, 4}, index({5, 4}, 4)},
      [](const Tensors& x, int64_t r) { return at::multilabel_margin_loss(x[0], x[1], r); });
  return cases;
}

std::vector<Case> class_losses() {
  std::vector<Case> cases;
  add(cases, "nll", {{5, 4}, index({5}, 4)},
      [](const Tensors& x, int64_t r) { return at::nll_loss(x[0], x[1], {}, r); });
  add(cases, "nll_weighted", {{5, 4}, index({5}, 4), positive({4})},
      [](const Tensors& x, int64_t r) {
        return at::nll_loss(x[0], x[1], x[2].detach(), r, /*ignore_index=*/1);
      });
  add(cases, "nll_few", {{2, 4}, index({2}, 4)},
      [](const Tensors& x, int64_t r) { return at::nll_loss(x[0], x[1], {}, r); });
  add(cases, "nll_one_sample", {{4}, index({}, 4)},
      [](const Tensors& x, int64_t r) { return at::nll_loss(x[0], x[1], {}, r); });
  add(cases, "nll_2d", {{3, 4, 2, 5}, index({3, 2, 5}, 4)}, [](const Tensors& x, int64_t r) {
    return at::nll_loss2d(x[0], x[1], {}, r, /*ignore_index=*/2);
  });
  add(cases, "cross_entropy", {{5, 4}, index({5}, 4)}, [](const Tensors& x, int64_t r) {
    return at::cross_entropy_loss(x[0], x[1], {}, r, -100, 0.0);
  });
  add(cases, "cross_entropy_smooth", {{5, 4}, index({5}, 4)}, [](const Tensors& x, int64_t r) {
    return at::cross_entropy_loss(x[0], x[1], {}, r, -100, 0.1);
  });
  return cases;
}

const Cases kElementwise("losses", elementwise_losses());
const Cases kClasses("losses", class_losses());

}  // namespace
}  // namespace tessera::brute_force
