#pragma once

#include <tessera/nn/module_ref.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

/// Scopes for this thread and the backward that it calls, in whichever threads autograd runs it.
/// They nest: the last one begun ends first.
namespace tessera {

/// While it lives, plain tensors that meet distributed ones in an operator of this thread count as
/// replicated: the caller vouches that all ranks hold the same. As out= they take the whole result.
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// While it lives, an operator of this thread that has no sharding rule is an error, not a warning
/// and a gathering of its inputs.
class StrictSharding {
 public:
  StrictSharding();
  ~StrictSharding();
  StrictSharding(const StrictSharding&) = delete;
  StrictSharding& operator=(const StrictSharding&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// Collectives of distributed tensors on this thread while it lives; of nested ones the outer count
/// too. Read it while no backward runs.
class comm_debug {
 public:
  struct Count {
    int64_t collectives = 0;
    int64_t bytes = 0;  // of this rank's inputs
  };
  /// By kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter".
  using Counts = std::map<std::string, Count>;

  comm_debug();
  /// Counts by submodule too, of the hookable ones.
  explicit comm_debug(nn::ModuleRef module);
  ~comm_debug();
  comm_debug(const comm_debug&) = delete;
  comm_debug& operator=(const comm_debug&) = delete;

  const Counts& counts() const;
  /// By the dotted name of the innermost submodule whose forward was running; "": outside of all,
  /// backward among it.
  const std::map<std::string, Counts>& counts_by_module() const;
  int64_t total() const;
  void reset();
  /// A table of both.
  std::string to_string() const;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Who holds which part of a 1-D or 2-D distributed tensor, drawn in text.
std::string visualize_sharding(const at::Tensor& tensor);

}  // namespace tessera
