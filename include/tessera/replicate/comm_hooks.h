#pragma once

#include <tessera/comm.h>

#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

namespace torch::nn {
class Module;
}

namespace tessera {

/// Gradients on their way to the other ranks: a flat tensor, in the order in which they came.
class GradBucket {
 public:
  GradBucket(size_t index, bool is_last, at::Tensor buffer, std::vector<at::Tensor> parameters,
             Group group);

  size_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  /// This rank's gradients, not divided by anything. Memory of the engine: a hook may work in it.
  const at::Tensor& buffer() const { return buffer_; }
  /// Views of the buffer with the shapes of the parameters.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const Group& group() const { return group_; }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<at::Tensor> parameters_;
  Group group_;
};

/// What a comm hook returns: when it completes, its value is a tensor with as many elements as the
/// bucket, the averaged gradients (or whatever the hook wants them to be).
using BucketFuture = c10::intrusive_ptr<c10::ivalue::Future>;
/// Owns its state. Called on every rank for the same buckets in the same order.
using CommHook = std::function<BucketFuture(GradBucket& bucket)>;

/// The average, as without a hook.
BucketFuture allreduce_hook(GradBucket& bucket);
/// The average, sent as float16 or bfloat16: half the bytes, gradients rounded to that type.
BucketFuture fp16_compress_hook(GradBucket& bucket);
BucketFuture bf16_compress_hook(GradBucket& bucket);

/// The hook on a bucket that was cast to float16 or bfloat16: whatever it sends is half as large.
///   register_comm_hook(net, bf16_compress_wrapper(powersgd_hook()));
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

struct PowerSGDOptions {
  /// Of the matrices P and Q that travel instead of a gradient of rows x columns.
  int64_t matrix_approximation_rank = 1;
  /// Iterations before it are averaged as without a hook.
  int64_t start_powerSGD_iter = 1000;  // NOLINT: Python's name
  /// A gradient travels as it is unless it has more than this many times the elements of P and Q.
  double min_compression_rate = 2;
  /// What compression left out of a gradient is added to the next one.
  bool use_error_feedback = true;
  /// Q starts from the iteration before instead of from random numbers.
  bool warm_start = true;
  /// Added to norms that are divided by. With 0, columns of zeros stay zeros.
  double orthogonalization_epsilon = 0;
  uint32_t random_seed = 0;  // the same on all ranks; the numbers are those of Python's hook
  /// Multiplies matrices of one shape together.
  bool batch_tensors_with_same_shape = false;
};

/// Averages low-rank approximations of gradients (Vogels et al. 2019): a matrix of rows x columns
/// travels as rank * (rows + columns) numbers; vectors and what hardly shrinks travel as they are.
/// The callable owns what it remembers of gradients: make one per replicated module. The result
/// has the same bits on all ranks. A gradient that is not finite leaves no trace after its
/// iteration.
CommHook powersgd_hook(PowerSGDOptions options = {});

/// What such a hook remembers, to be saved with a checkpoint:
///   auto state = std::make_shared<PowerSGDState>(options);
///   register_comm_hook(net, state->hook());
///   tessera::save(dir, net, optimizer, state->save(*net));         // and other things
///   state->load(*net, tessera::load(dir, net, optimizer));
class PowerSGDState : public std::enable_shared_from_this<PowerSGDState> {
 public:
  explicit PowerSGDState(PowerSGDOptions options = {});
  ~PowerSGDState();

  /// Owns the state; for one replicated module.
  CommHook hook();

  /// This rank's, by names of parameters. Between iterations.
  std::map<std::string, std::string> save(const torch::nn::Module& module) const;
  /// Takes what save() gave on the same rank for a model of the same shapes, and leaves other
  /// entries alone. Without any it begins anew; throws a ValueError, and changes nothing, if they
  /// do not fit.
  void load(const torch::nn::Module& module, const std::map<std::string, std::string>& saved);

 private:
  friend struct PowerSGDHook;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
