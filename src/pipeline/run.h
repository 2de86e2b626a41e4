#pragma once

#include <tessera/nn/gradient_sync.h>
#include <tessera/pipeline.h>

#include "pipeline/messages.h"
#include "pipeline/split_backward.h"

#include <c10/core/Event.h>

#include <chrono>
#include <map>
#include <utility>
#include <vector>

/// One pass over a batch.
namespace tessera::detail::pipeline {

/// How long a rank computes. On a GPU by events in its stream, which are read when asked for.
class BusyClock {
 public:
  explicit BusyClock(c10::Device device = c10::kCPU) : device_(device) {}
  void begin();
  void end();
  PipelineStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  c10::Device device_;
  std::vector<std::pair<Clock::time_point, Clock::time_point>> times_;
  std::vector<std::pair<c10::Event, c10::Event>> events_;
};

/// Of one stage during a step: its data parallel modules average in the last backward alone.
class StageSync {
 public:
  explicit StageSync(torch::nn::Module& stage);
  ~StageSync();
  StageSync(const StageSync&) = delete;
  StageSync& operator=(const StageSync&) = delete;

  /// Before the last gradients of parameters; of `output`, if it still has a graph.
  void begin_last(const at::Tensor& output);
  /// Whether a backward may come in two parts. Not where the end of the first would be taken for
  /// the end of all, as by units of fully_shard and searches for unused parameters, nor where each
  /// computes the forward again, as checkpoints do.
  bool can_split() const { return can_split_; }

 private:
  std::vector<std::shared_ptr<nn::SyncsGradients>> before_;  // those that average
  bool can_split_ = true;
};

enum class RunKind { Train, Evaluate, Forward };

/// What a run needs and does not own.
struct RunSettings {
  const PipelineTable& table;
  const PipelineOptions& options;
  std::vector<nn::Sequential>& stages;  // of this rank
  Messages& messages;
  int rank;
  c10::Device device;
};

class Run {
 public:
  Run(RunSettings settings, RunKind kind, const at::Tensor& inputs, const at::Tensor& targets);

  /// All actions of this rank.
  void run(const std::vector<PipelineAction>& actions);
  /// Where the last stage is: the loss, weighted; or the outputs, put together.
  at::Tensor loss() const { return loss_; }
  at::Tensor output() const;
  BusyClock take_clock() { return std::move(clock_); }

 private:
  using Key = std::pair<int, int>;  // stage, microbatch
  struct Flight {
    at::Tensor input;
    at::Tensor output;  // of the last stage: the weighted loss
    SplitBackward weights;
  };

  bool is_last(int stage) const {
    return stage + 1 == static_cast<int>(settings_.table.stage_ranks.size());
  }
  size_t local_index(int stage) const;
  std::optional<MessageKey> needed_by(const PipelineAction& action) const;
  void expect(const PipelineAction& action);
  void act(const PipelineAction& action);
  void forward(int stage, int microbatch);
  at::Tensor take_input(int stage, int microbatch);
  void finish_last_stage(const at::Tensor& output, int microbatch, Flight& flight);
  void backward(const PipelineAction& action);
  at::Tensor incoming_gradient(int stage, int microbatch, const at::Tensor& output);
  double weight_of(int microbatch) const;
  /// Before gradients of parameters come.
  void begin_gradients(int stage, const at::Tensor& output);

  RunSettings settings_;
  RunKind kind_;
  std::vector<at::Tensor> inputs_;  // by microbatch, where they are needed
  std::vector<at::Tensor> targets_;
  int64_t rows_ = 0;
  std::map<Key, Flight> flights_;
  std::vector<std::unique_ptr<StageSync>> syncs_;  // of this rank's stages
  std::vector<int> gradients_left_;                // of each: microbatches without any yet
  at::Tensor loss_;
  std::vector<at::Tensor> outputs_;
  BusyClock clock_;
};

}  // namespace tessera::detail::pipeline
