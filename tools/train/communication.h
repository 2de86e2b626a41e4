#pragma once

#include <tessera/fully_shard.h>
#include <tessera/replicate.h>

#include <nlohmann/json.hpp>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

/// What a fully_shard unit, or a bucket of gradients under replicate, has cost this rank in a step.
struct UnitCommunication {
  std::string name;
  int64_t parameters = 0;  // tensors
  double bytes = 0;        // of what it unshards and reduces
  double seconds = 0;      // at work in its messages, or waiting for other ranks
};

/// Adds up what the units of a model communicate in steps, and in nothing else.
class UnitMeter {
 public:
  /// After the model is spread over ranks.
  explicit UnitMeter(const std::shared_ptr<torch::nn::Module>& model);

  void begin_step();
  void end_step();
  /// The mean of the steps so far, in the order of modules or of buckets; none: nothing travels
  /// between ranks, or programs send it.
  std::vector<UnitCommunication> mean() const;

 private:
  struct Unit {
    std::string name;
    std::shared_ptr<FullyShardState> state;
    FullyShardStats before = {};
    int64_t bytes = 0;
    double seconds = 0;
  };
  std::vector<Unit> units_;
  std::shared_ptr<ReplicateState> replicated_;  // null: it is not
  int64_t steps_ = 0;
};

/// "communication per step: 3 units, 1.25 MB, 0.41 ms; most in blocks.1 (0.5 MB, 0.2 ms), …".
std::string described(const std::vector<UnitCommunication>& units);
nlohmann::json to_json(const std::vector<UnitCommunication>& units);

}  // namespace tessera::train
