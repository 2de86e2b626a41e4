#pragma once

#include <tessera/optim/optimizer.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// In Python's order.
struct MuonOptions {
  double lr = 1e-3, weight_decay = 0.1, momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int64_t ns_steps = 5;
  /// "original" (as none): lr times sqrt(max(1, rows / columns)); "match_rms_adamw": lr times
  /// 0.2 sqrt(max(rows, columns)), for learning rates that were found with AdamW.
  std::optional<std::string> adjust_lr_fn = std::nullopt;
};

ParamGroup param_group(std::vector<at::Tensor> params, MuonOptions options);

/// Momentum made orthogonal by a Newton-Schulz iteration in bfloat16, as torch.optim.Muon: for the
/// matrices of hidden layers; embeddings, heads, biases and norms are AdamW's. Matrices of one
/// shape are iterated together. Sharded ones are dealt out: each rank gets its share of them whole,
/// and gives the results back in shards, so that every rank of their mesh calls step(), with
/// gradients for the same parameters. Groups with AdamWOptions are updated as AdamW does, whatever
/// their shapes: one optimizer for all parameters. Where a processor has no instructions for
/// products of bfloat16, they are made in float32 and rounded.
class Muon : public Optimizer {
 public:
  explicit Muon(std::vector<at::Tensor> params, MuonOptions options = {});
  explicit Muon(const std::vector<ParamGroup>& groups, MuonOptions defaults = {});
  MuonOptions& options(size_t group = 0);
};

}  // namespace tessera::optim
