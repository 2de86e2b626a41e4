#pragma once

#include "train/model.h"

#include <c10/core/Device.h>

#include <optional>
#include <string>

/// How much of what its devices could compute a job makes use of (MFU).
namespace tessera::train {

/// Floating-point operations of forward and backward per token, by convention: 6 for each weight of
/// a matrix product, and 12 * blocks * width * context for attention as if it were not causal. What
/// is computed again does not count.
double flops_per_token(const ModelShape& shape);

/// The dense matrix products per second that a GPU's maker promises in bf16 and fp16, by the name
/// of the model, e.g. "NVIDIA H200"; none for one that is not known.
std::optional<double> peak_flops(const std::string& name);

/// As its driver calls it; empty for a CPU.
std::string device_name(c10::Device device);

/// Of all devices of all ranks, where they are GPUs that are known and --precision has 16 bits.
/// Ranks that share one count it once. Every rank calls it.
std::optional<double> peak_of_all(c10::Device device, const std::string& precision);

}  // namespace tessera::train
