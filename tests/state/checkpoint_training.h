#pragma once

#include "state/checkpoint_models.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

/// Training of the small model, and what compares two of them.
namespace tessera::testing {

inline optim::AdamW make_adamw(const CheckpointNet& net) {
  return optim::AdamW(std::vector<optim::ParamGroup>{
      optim::param_group({net->qkv->weight, net->out->weight},
                         optim::AdamWOptions{.lr = 0.1 / 3, .weight_decay = 0.05}),
      optim::param_group(
          {net->in->weight, net->in->bias, net->qkv->bias, net->out->bias, net->norm->weight,
           net->norm->bias, net->head->weight, net->head->bias, net->scale},
          optim::AdamWOptions{.lr = 1e-2})});
}

/// Step number `step` on data that all ranks share.
inline void train_step(CheckpointNet net, torch::optim::Optimizer& optimizer, int step) {
  const auto x = seeded(100 + static_cast<uint64_t>(step), [] {
                   return at::randn({4, 7});
                 }).to(net->mask.device());
  optimizer.zero_grad();
  net->forward(x).square().mean().backward();
  optimizer.step();
  const at::NoGradGuard no_grad;
  net->seen.add_(1);
}

using Wholes = std::map<std::string, at::Tensor>;

/// Whole copies of everything that is saved, in the order of the plain model. Every rank calls it.
inline Wholes wholes_of(const CheckpointNet& net, const optim::Optimizer& optimizer,
                        int64_t packed_ranks) {
  const at::NoGradGuard no_grad;
  Wholes wholes;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_qkv) {
    auto whole = is_dtensor(tensor) ? DTensor::of(tensor.detach()).full_tensor() : tensor.detach();
    if (is_qkv && packed_ranks > 0 && whole.dim() > 0) whole = unpack_rows(whole, 3, packed_ranks);
    wholes[name] = whole.clone();
  };
  for (const auto& item : net->named_parameters()) {
    const bool is_qkv = item.key().starts_with("qkv.");
    add(item.key(), item.value(), is_qkv);
    for (const auto& [field, value] : optimizer.state_of(item.value()))
      add(item.key() + "/" + field, value, is_qkv && field != "step");
  }
  for (const auto& item : net->named_buffers()) {
    if (item.key() != "scratch") add(item.key(), item.value(), false);
  }
  return wholes;
}

inline void expect_wholes(const Wholes& actual, const Wholes& expected, bool is_bitwise) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(actual.count(name), 1U) << name;
    if (is_bitwise)
      expect_bitwise_equal(actual.at(name).cpu(), tensor.cpu(), name);
    else
      expect_equal(actual.at(name).cpu(), tensor.cpu(), name,
                   Tolerance{.rtol = 1e-4, .atol = 1e-5});
  }
}

/// Over how many ranks the layout packs `qkv`; 0: it does not.
inline int64_t packed_ranks_of(Layout layout) {
  switch (layout) {
    case Layout::TpPacked:
      return world_size();
    case Layout::TpReplicate:
    case Layout::TpFullyShard:
      return world_size() % 2 == 0 ? 2 : 1;
    default:
      return 0;
  }
}

}  // namespace tessera::testing
