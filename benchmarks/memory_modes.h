#pragma once

#include "jobs.h"

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::benchmarks {

struct MemoryUse {
  size_t steady_bytes;  // between steps: parameters, gradients, the optimizer's state, the batch
  size_t peak_bytes;    // above that, at the worst moment of a forward and its backward
};

/// gpt, attention.
std::vector<std::string> memory_job_names();
/// plain, checkpoint, …, of all jobs.
std::vector<std::string> memory_mode_names();

/// What is trained.
struct MemoryJob {
  std::string name;
  int blocks = 12;         // of the gpt; attention has one layer
  int64_t tokens = 32768;  // of a sequence of attention

  /// "gpt", "attention of 32768 tokens".
  std::string label() const;
};
/// Those of its modes that the job knows.
bool has_mode(const MemoryJob& job, const std::string& mode);

/// The job as the mode trains it, with the batch of the rank `batch`. Every rank calls it.
Job make_in_mode(const MemoryJob& job, const std::string& mode, int batch);

/// Whether the mode's gradients are those of plain training bit for bit. Others are averages over
/// the ranks, equal up to rounding where all ranks have one batch.
bool is_exact(const std::string& mode);

/// Whether the job's steps are timed: one of attention takes too long to be done often.
bool is_timed(const MemoryJob& job);

/// Whether the mode is about the start of training: the model is built without memory, on the meta
/// device, and what counts are the bytes there are when it has got its values, and the most on top
/// of them until then. Its values are others than plain's.
bool is_start(const std::string& mode);

/// What the mode may take, where plain training takes `plain`; 0: no bound. Of checkpoint and
/// context_parallel: peak bytes. Of fully_shard, also at its start: steady and peak bytes together.
size_t bound_of(const MemoryJob& job, const std::string& mode, const MemoryUse& plain);

/// What each unit of a fully sharded model keeps and has freed, a line each; nothing for others.
std::string describe_units(const torch::nn::Module& model);

}  // namespace tessera::benchmarks
