#pragma once

#include <tessera/detail/nn/sequential.h>
#include <tessera/mesh.h>
#include <tessera/nn/module_ref.h>

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Pipeline parallelism: a chain of modules cut into stages, each on one rank; microbatches flow
/// through them, activations forward and gradients backward, from rank to rank.
namespace tessera {

/// Who does what when. Of p ranks, m microbatches and v stages per rank, forward taking as long as
/// each half of backward, ranks are idle for this share of a step:
enum class PipelineSchedule {
  GPipe,            // all forwards, then all backwards: (p-1)/(m+p-1)
  OneFOneB,         // the same share, and at most p microbatches in memory
  Interleaved1F1B,  // v stages per rank, rank r has r, r+p, …: (p-1)/(vm+p-1)
  ZeroBubble,       // ZB-H1: gradients of weights fill the gaps: (p-1)/(3m+p-1)
  ZBVZeroBubble,    // rank r has stages r and 2p-1-r: (p-1)/(6m+p-1) or little more
};
std::ostream& operator<<(std::ostream& out, PipelineSchedule schedule);

/// What one rank does with one microbatch at one stage: "2F0" is stage 2's forward of microbatch 0.
struct PipelineAction {
  enum class Kind {
    Forward,         // F
    Backward,        // B, both of the following
    BackwardInput,   // I, the gradient that the stage before waits for
    BackwardWeight,  // W, the gradients of parameters
  };
  int stage = 0;
  Kind kind = Kind::Forward;
  int microbatch = 0;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
  friend std::ostream& operator<<(std::ostream& out, const PipelineAction& action);
};

/// The actions of all ranks, in their order: all there is to a schedule, and all that runs.
struct PipelineTable {
  int microbatches = 0;
  std::vector<int> stage_ranks;                      // the rank of each stage
  std::vector<std::vector<PipelineAction>> actions;  // by rank
  /// A line per rank: "rank 0: 0F0 0F1 0B0 0B1".
  friend std::ostream& operator<<(std::ostream& out, const PipelineTable& table);
};

/// `stages_per_rank` 0: the schedule's own, 1 or 2.
PipelineTable make_pipeline_table(PipelineSchedule schedule, int ranks, int microbatches,
                                  int stages_per_rank = 0);
/// Throws a ValueError unless every stage does every microbatch once, forward before backward, on
/// its rank, and no rank waits for what can't come.
void verify_pipeline_table(const PipelineTable& table);

/// How long actions take; B is I and W together.
struct PipelineCosts {
  double forward = 1, backward_input = 1, backward_weight = 1;
};
struct PipelineSimulation {
  double duration = 0;
  double bubble_share = 0;     // of all ranks' time, in which they wait
  std::vector<int> most_held;  // by rank: forwards, at most, whose backward is not done
};
/// A step in which messages take no time.
PipelineSimulation simulate_pipeline(const PipelineTable& table, PipelineCosts costs = {});

enum class PipelineReduction { Mean, Sum };

struct PipelineOptions {
  Group group = {};  // none: `mesh`'s, or the default group
  std::optional<DeviceMesh> mesh = std::nullopt;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  /// A table of one's own in place of a schedule's; `n_microbatches` is then its number.
  std::optional<PipelineTable> table = std::nullopt;
  /// Into which the rows of a batch are cut, as evenly as they can be.
  int n_microbatches = 0;
  int stages_per_rank = 0;  // 0: the schedule's own, 1 or 2
  /// Names of the children at which stages begin, but for the first: {"2", "4"} makes three. Empty:
  /// borders that make the largest stage's parameters as few as can be.
  std::vector<std::string> split_points = {};
  /// Of the last stage's output and its targets, by microbatch, on its rank. All ranks give it.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss_fn = {};
  /// What loss_fn does over rows: a mean of microbatches is weighted by their rows.
  PipelineReduction loss_reduction = PipelineReduction::Mean;
  /// Where this rank's stages are moved; modules built under MetaInit get memory there, and values
  /// as torch::nn's start or by param_init_fn. None: they stay where they are.
  std::optional<c10::Device> device = std::nullopt;
  std::function<void(torch::nn::Module&)> param_init_fn = {};
};

/// What the last step of this rank took.
struct PipelineStats {
  double seconds = 0;       // from its first action to its last
  double busy_seconds = 0;  // in forwards and backwards: the rest is the bubble
};

/// This rank's part of a pipeline. Copies are cheap and mean the same.
class Pipeline {
 public:
  /// Forward and backward of all microbatches; the loss, on every rank. Gradients are added to
  /// .grad as those of one rank would be. Every rank of the group calls it. `inputs` are read where
  /// the first stage is, `targets` where the last is; others may pass anything. In the first step
  /// ranks tell each other shapes and dtypes; another batch size is an error later, see
  /// reset_shapes(). After an error in the middle of a step the pipeline is of no more use.
  at::Tensor step(const at::Tensor& inputs, const at::Tensor& targets);
  /// The loss without gradients, on every rank.
  at::Tensor eval(const at::Tensor& inputs, const at::Tensor& targets);
  /// The output without gradients where the last stage is, elsewhere undefined.
  at::Tensor forward(const at::Tensor& inputs);
  /// Before batches of another size: on every rank.
  void reset_shapes();

  /// The stages of this rank, in their order: modules to be given to parallelize_module,
  /// checkpoint, replicate or fully_shard before the first step. They share the children of the
  /// net.
  const std::vector<nn::Sequential>& stages() const;
  const PipelineTable& table() const;
  PipelineStats stats() const;

  /// As optim::clip_grad_norm_ over the parameters of all stages. Every rank calls it.
  at::Tensor clip_grad_norm_(  // NOLINT(readability-identifier-naming): Python's name
      double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  class Impl;
  explicit Pipeline(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

namespace detail {
Pipeline make_pipeline(torch::nn::Module& net, PipelineOptions options);
}

/// Cuts a Sequential, whose children take and give one tensor, into stages. Every rank of the group
/// calls it once, with the same net. The net stays what optimizers, save, load and state dicts are
/// given: names, and parameters as objects, do not change, but those of other ranks' stages lose
/// their memory here and never get a gradient. A parameter of two stages on different ranks is an
/// error. Replicated, sharded or tensor parallel are the stages, afterwards.
template <nn::ModuleLike M>
Pipeline pipeline(M&& net, PipelineOptions options) {
  return detail::make_pipeline(nn::as_module(net), std::move(options));
}

}  // namespace tessera
