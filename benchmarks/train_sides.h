#pragma once

#include "jobs.h"
#include "train_peer_job.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// What a rank has to show after training: enough to tell a wrong result from a rounded one.
struct RankReport {
  std::vector<double> losses;                   // by step
  std::vector<std::vector<double>> parameters;  // of each: numel, sum, norm, then sampled elements
};
using Report = std::vector<RankReport>;  // by rank

/// A kernel, copy or fill of a GPU.
struct Kernel {
  std::string name;
  double microseconds;
  double begin = 0;  // microseconds since the first of the step
};

/// Bytes that a process holds of its GPU, cached ones and those of CUDA graphs included.
struct DeviceMemory {
  int64_t steady;  // at most while warm steps run
  int64_t peak;    // at most since the side was made: first calls and recordings too
};

/// One of those that are compared: as many processes as ranks, of one thread each, that train one
/// job. Every rank calls the members and gets the same result. While one side works, the processes
/// of the others sleep.
class Side {
 public:
  virtual ~Side() = default;
  virtual Report train(int steps) = 0;
  /// Seconds per step, of the slowest rank; a tenth more steps before them warm up.
  virtual double time_block(int steps) = 0;
  /// Of the rank that holds most; nothing on a CPU. Trains some steps.
  virtual std::optional<DeviceMemory> memory() = 0;
  /// What rank 0's GPU does in one step, after some that warm up.
  virtual std::vector<Kernel> kernels() = 0;
};

/// Trains the job in the calling processes, with AdamW, on CUDA in bf16 by autocast; `compiles`:
/// the whole step is a program. Gives cached memory of the GPU back first.
std::unique_ptr<Side> make_local_side(Job job, bool compiles = false);
/// Trains in processes of peers/train.py, which rank 0 starts unless they are there; until the next
/// one begins in them.
std::unique_ptr<Side> make_python_side(PeerJobs& processes, const PeerGroup& group,
                                       const PeerJob::Task& task);

/// In what two sides that compute the same may differ.
enum class Rounding {
  Same,            // the same kernels: float32's tolerance
  OtherGradients,  // sums of some gradients are of another order: parameters by kernels of their
                   // own
  Other,           // kernels of their own, or bf16
  EightBits        // products in float8 against bf16
};

/// Throws unless losses and parameters of all ranks agree within the tolerance of that.
void require_agreement(const Report& expected, const Report& actual, Rounding rounding,
                       const std::string& who);

}  // namespace tessera::benchmarks
