#pragma once

#include <tessera/optim/optimizer.h>

#include <optional>
#include <utility>
#include <vector>

namespace tessera::optim {

/// In Python's order. The first of `eps`: none is the precision of the parameter's dtype.
struct AdafactorOptions {
  double lr = 1e-2, beta2_decay = -0.8;
  std::pair<std::optional<double>, double> eps = {std::nullopt, 1e-3};
  double d = 1, weight_decay = 0;
  std::optional<bool> foreach = std::nullopt;  // there are no list kernels: true is refused
  bool maximize = false;
};

ParamGroup param_group(std::vector<at::Tensor> params, AdafactorOptions options);

/// As torch.optim.Adafactor: of the second moment of a matrix the mean of each row and column is
/// kept alone ("row_var", "col_var"). Of sharded parameters each rank keeps what belongs to its
/// part; sums over the shards are exchanged together, in two messages per step: every rank of their
/// mesh calls step(), with gradients for the same parameters.
class Adafactor : public Optimizer {
 public:
  explicit Adafactor(std::vector<at::Tensor> params, AdafactorOptions options = {});
  explicit Adafactor(const std::vector<ParamGroup>& groups, AdafactorOptions defaults = {});
  AdafactorOptions& options(size_t group = 0);
};

}  // namespace tessera::optim
