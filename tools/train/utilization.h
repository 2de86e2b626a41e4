#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// How much of what its devices could compute a job makes use of (MFU).
namespace tessera::train {

/// What a token costs.
struct TokenWork {
  double weights = 0;  // that it is multiplied by
  double frozen = 0;   // of these; they have no gradient
  int64_t blocks = 0, attention_width = 0, context = 0;
};

/// Floating-point operations of forward and backward per token, by convention: 6 for each weight of
/// a matrix product (4 if it is frozen), and 12 * blocks * width * context for attention as if it
/// were not causal. What is computed again does not count.
double flops_per_token(const TokenWork& work);

/// The dense matrix products per second that a GPU's maker promises in bf16 and fp16, by the name
/// of the model, e.g. "NVIDIA H200"; none for one that is not known.
std::optional<double> peak_flops(const std::string& name);

/// A GPU that ranks of the job compute on.
struct UsedDevice {
  std::string uuid;  // which tells it from others: indices are those that a process sees
  std::string name;  // as its driver calls it
  std::string host = {};
  int index = 0;      // as the first of its ranks sees it
  int64_t ranks = 1;  // that share it
};

/// Those of equal UUID as one, in the order of the first of each.
std::vector<UsedDevice> merge_devices(const std::vector<UsedDevice>& by_rank);
/// Of all ranks, each once; none on the CPU. Every rank calls it.
std::vector<UsedDevice> used_devices(c10::Device device);

/// Of all of them, where they are known and --precision has 16 bits.
std::optional<double> peak_of(const std::vector<UsedDevice>& devices, const std::string& precision);

/// What products of large matrices reach here, of all ranks at once, where no peak is known. Takes
/// some hundredths of a second. Every rank calls it.
double measured_peak(c10::Device device, const std::string& precision);

/// "2 ranks share GPU 0 (NVIDIA H200): for tests, not for speed"; empty if each rank has its own.
std::string sharing_of(const std::vector<UsedDevice>& devices);

}  // namespace tessera::train
