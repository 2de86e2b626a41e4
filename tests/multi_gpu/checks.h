#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace multi_gpu {

struct Setting {
  c10::Device device;    // of this rank
  bool shares_device;    // with other ranks: times say nothing of links
  std::string folder;    // for saved checkpoints; all ranks see it
  double peak_gbps = 0;  // of the links between two devices, in one direction; 0: unknown
};

/// What one check found on this rank.
struct Outcome {
  bool passed;
  std::string text;
};

// Every rank calls them, in the same order. Engines are compared with one process that has the
// whole batch.
Outcome check_replicate(const Setting& setting);
Outcome check_fully_shard(const Setting& setting);
/// With fully_shard along the other dimension of the mesh.
Outcome check_tensor_parallel(const Setting& setting);
Outcome check_redistribute(const Setting& setting);
/// Saved by fully sharded ranks; loaded by such, and by one process.
Outcome check_checkpoint(const Setting& setting);
/// All-reduce, all-gather and reduce-scatter by size, against the links' peak.
Outcome check_bandwidth(const Setting& setting);
/// How much of the communication of a replicated step is hidden behind its backward.
Outcome check_overlap(const Setting& setting);

/// Returns when the device has done all that it was given.
void synchronize(c10::Device device);
double median(std::vector<double> values);

}  // namespace multi_gpu
