#pragma once

#include <tessera/compile/pass.h>
#include <tessera/mesh.h>

#include <concepts>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// How a step that was written for one rank becomes one of many. Derive for a way of your own.
class ParallelMode {
 public:
  virtual ~ParallelMode() = default;
  /// The ranks it runs on; parameters and state are distributed over this mesh.
  virtual DeviceMesh mesh(c10::DeviceType device) const = 0;
  /// Rewrites the step of one rank, on its part of the batch, into this rank's part of the step of
  /// all. The placements it gives to inputs that are parameters or optimizer state are those they
  /// get. A node tessera::gradient(%gradient, %parameter) marks where the step has a gradient;
  /// none may be left.
  virtual void partition(Graph& graph, const DeviceMesh& mesh) const = 0;
  /// Run after ours.
  virtual std::vector<Pass> passes() const { return {}; }
};

/// A ParallelMode of any kind, as an option.
class AnyParallelMode {
 public:
  AnyParallelMode() = default;
  template <std::derived_from<ParallelMode> M>
  AnyParallelMode(M mode)  // NOLINT(google-explicit-constructor)
      : mode_(std::make_shared<M>(std::move(mode))) {}

  explicit operator bool() const { return mode_ != nullptr; }
  const ParallelMode* operator->() const { return mode_.get(); }

 private:
  std::shared_ptr<const ParallelMode> mode_;
};

struct DataParallelOptions {
  /// The dimension of the function's tensors along which each rank passes its part.
  int64_t input_batch_dim = 0;
  /// Run after ours.
  std::vector<Pass> custom_passes = {};
};

/// The step on every rank's part of the batch, with averaged gradients. "replicate": every rank
/// has all parameters. "fully_shard": each has its rows of parameters and optimizer state and
/// gathers the rest when it computes. Over all ranks.
class DataParallel final : public ParallelMode {
 public:
  explicit DataParallel(std::string parallel_style = "replicate", DataParallelOptions options = {});

  DeviceMesh mesh(c10::DeviceType device) const override;
  void partition(Graph& graph, const DeviceMesh& mesh) const override;
  std::vector<Pass> passes() const override { return options_.custom_passes; }

 private:
  std::string style_;
  DataParallelOptions options_;
};

}  // namespace tessera
