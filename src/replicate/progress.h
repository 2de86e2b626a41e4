#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::detail::replicate {

/// What this rank did since gradients were last averaged, as far as it shows. Ranks that differ in
/// it have skipped something, and would average gradients of different batches, or of different
/// parameters.
class Progress {
 public:
  /// A forward has ended, whose backward is to be averaged. `graph` lives as long as its graph.
  void add_forward(const std::weak_ptr<void>& graph);
  /// For errors and for comparison; none before restart().
  std::optional<std::string> describe(const std::vector<at::Tensor>& parameters);
  /// Gradients have been averaged.
  void restart(const std::vector<at::Tensor>& parameters);
  /// Ranks have done different things, as they may: nothing is compared until restart().
  void forget();

  /// By which parameters are seen to have changed.
  struct Mark {
    int64_t writes;           // that autograd has counted
    std::vector<char> a_few;  // values: torch::optim and fused kernels write past autograd
    bool operator==(const Mark&) const = default;
  };

 private:
  void notice_lost();

  // A forward may be one of several of a backward, so it is lost when its graph has gone before
  // one. How many are does not count: ranks may call a module as often as they like.
  std::vector<std::weak_ptr<void>> forwards_;
  bool has_lost_ = false;
  std::optional<Mark> mark_;
};

}  // namespace tessera::detail::replicate
