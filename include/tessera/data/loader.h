#pragma once

#include <tessera/data/sampler.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::data {

struct LoaderOptions {
  int64_t batch_size = 1;  // samples of this rank
  int threads = 1;         // that read ahead; 0: next() reads itself
  int64_t prefetch = 2;    // batches that are read, or being read, before next() asks for them
  c10::Device device = c10::Device(c10::kCPU);                  // where batches are to lie
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of next(), for a batch to be read
  SamplerOptions sampler = {};
};

/// Batches of any data set that has a length, in the order of a ShardedSampler, read ahead by
/// threads of its own. For a GPU they go through pinned memory, on a stream of their own, while the
/// device computes. The order depends neither on threads nor on prefetch. One thread uses it.
class Loader {
 public:
  /// What the samples are: tensors on the CPU, the first dimension of each being the samples.
  /// Threads call it at the same time; it talks to no other rank.
  using Read = std::function<std::vector<at::Tensor>(c10::ArrayRef<int64_t> samples)>;

  Loader(int64_t samples, Read read, LoaderOptions options = {});
  /// Waits for reads that are under way.
  ~Loader();
  Loader(Loader&& other) noexcept;
  Loader& operator=(Loader&& other) noexcept;

  /// The next batch, on the device as far as the current stream is concerned. Throws what `read`
  /// has thrown for it, or a RuntimeError if that has not returned in time: asked again, it is read
  /// again.
  std::vector<at::Tensor> next();

  /// How many samples next() has given to all ranks together. With it the row of batches goes on,
  /// on any number of ranks.
  int64_t position() const;
  void seek(int64_t position);

  int64_t samples() const;
  /// Of the next sample.
  int64_t epoch() const;
  /// Seconds that next() has waited for reads so far: a data set that keeps up costs none.
  double waited() const;

 private:
  struct Impl;

  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::data
