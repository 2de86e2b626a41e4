#pragma once

#include <tessera/comm.h>

#include "support/tolerance.h"
#include "support/trainee.h"
#include "support/twins.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

/// "Parallel training equals training in one process", as one call.
namespace tessera::testing {

using OptimizerFactory =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;
OptimizerFactory sgd(double lr, double momentum = 0, double weight_decay = 0);
OptimizerFactory adam(double lr);
OptimizerFactory adamw(double lr, double weight_decay = 1e-2);

struct TrainingOptions {
  int steps = 5;
  OptimizerFactory optimizer = adam(1e-2);
  std::vector<int64_t> input = {2, 100};  // shape; with `local_batch_of` of the global batch
  /// False: every rank draws inputs of its own; the reference then has to average gradients, too.
  bool same_inputs = true;
  bool zero_grad_to_none = true;
  /// The parallel model sees this rank's share of the rows, the reference all of them; its loss is
  /// averaged over the group before it is compared.
  std::optional<Group> local_batch_of = std::nullopt;
  /// Of the output. None: its sum, or with `local_batch_of` the mean of its squares.
  std::function<at::Tensor(const at::Tensor& output)> loss = {};
  /// Makes a parameter or loss of the parallel model comparable, e.g. a DTensor full. None: as is.
  std::function<at::Tensor(const at::Tensor&)> full = {};
  uint64_t seed = 0;                                  // of the inputs
  std::optional<Tolerance> tolerance = std::nullopt;  // none: by dtype
};

/// Trains both on equal inputs; losses must be equal after each step and every parameter, by
/// position, at the end. Every rank of the parallel model calls it. Each: a holder, a shared_ptr, a
/// module or a Trainee.
template <class Reference, class Parallel>
void expect_training_parity(Reference&& reference, Parallel&& parallel,
                            TrainingOptions options = {});

struct DataParallelOptions {
  int iterations = 2;
  std::vector<int64_t> sample = {2};  // shape of one row
  Tolerance tolerance = {.rtol = 1.3e-6, .atol = 5e-5};
  std::function<at::Tensor(const at::Tensor&)> full = {};
};

/// The training comparison of REQUIREMENTS.md 1.0: the reference learns the batch of `world_size`
/// rows, `replicated` row `rank` of it, both with a learning rate of 1 by hand; parameters are
/// compared after every iteration.
template <class Reference, class Parallel>
void expect_data_parallel_parity(Reference&& reference, Parallel&& replicated,
                                 DataParallelOptions options = {});

/// The templates' bodies, once.
void compare_training(const Trainee& reference, const Trainee& parallel,
                      const TrainingOptions& options);
void compare_data_parallel(const Trainee& reference, const Trainee& replicated,
                           const DataParallelOptions& options);

template <class Reference, class Parallel>
void expect_training_parity(Reference&& reference, Parallel&& parallel, TrainingOptions options) {
  compare_training(trainee(reference), trainee(parallel), options);
}

template <class Reference, class Parallel>
void expect_data_parallel_parity(Reference&& reference, Parallel&& replicated,
                                 DataParallelOptions options) {
  compare_data_parallel(trainee(reference), trainee(replicated), options);
}

}  // namespace tessera::testing
