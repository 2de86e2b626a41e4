#pragma once

#include <torch/csrc/api/include/torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct ReplicateOptions;

/// What the engine did; times are of the last synchronising iteration.
struct ReplicateStats {
  int64_t iterations = 0;             // backwards that averaged, this rank's or shadowed ones
  bool buckets_rebuilt = false;       // by the order in which gradients really came
  std::vector<int64_t> bucket_bytes;  // in the order of launch
  std::vector<std::vector<std::string>> bucket_parameters;
  /// That the calling threads were in messages of each, at work or waiting; the mean of the
  /// iterations since buckets are as they are. On a GPU not those of the device.
  std::vector<double> bucket_seconds;
  double forward_seconds = 0;
  double backward_compute_seconds = 0;  // from the end of forward to the last gradient
  double communication_seconds = 0;     // from the first launch to the last result
  double overlap_seconds = 0;           // of these, before the last gradient
};

/// The data parallel engine of one replicated module.
class ReplicateEngine {
 public:
  virtual ~ReplicateEngine() = default;
  virtual ReplicateStats stats() const = 0;
  /// Where inputs are moved: one index, or none for the CPU.
  std::optional<std::vector<int64_t>> device_ids;
};

/// The engine, or none yet: a pointer that may be asked whether it is null, and whose use then is
/// an error that names the module. The engine lives as long as the state.
class ReplicateEngineHandle {
 public:
  ReplicateEngineHandle(ReplicateEngine* engine, std::string module_name)
      : engine_(engine), module_name_(std::move(module_name)) {}
  ReplicateEngine& operator*() const;
  ReplicateEngine* operator->() const { return &**this; }
  operator ReplicateEngine*() const { return engine_; }  // NOLINT: a pointer to all who want one

 private:
  ReplicateEngine* engine_;
  std::string module_name_;
};

/// What replicate keeps with a module.
class ReplicateState {
 public:
  virtual ~ReplicateState() = default;
  /// Names of the parameters it averages, relative to the module. Empty before the engine exists.
  virtual std::vector<std::string> param_names() const = 0;
  /// None before the first forward of a hookable module.
  virtual ReplicateEngineHandle engine() const = 0;
  virtual bool requires_gradient_sync() const = 0;
};

/// Null if replicate was never applied to this module.
std::shared_ptr<ReplicateState> replicate_state(const torch::nn::Module& module);
template <class M>
  requires requires(const M& m) { m.operator*(); }
std::shared_ptr<ReplicateState> replicate_state(const M& module) {
  return replicate_state(*module);
}

namespace detail {
void replicate_module(torch::nn::Module& module, ReplicateOptions options);
}

}  // namespace tessera
