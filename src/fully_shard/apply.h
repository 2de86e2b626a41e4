#pragma once

#include "fully_shard/state_impl.h"

namespace tessera::sharded {

/// The mesh that the options name; the same for the same group, so that all units' parameters lie
/// on one.
DeviceMesh mesh_for(const FullyShardOptions& options, c10::DeviceType device);

/// The ranks among which reshard_after_forward, if it is a number, keeps a copy; null if it is
/// none. A collective.
Group neighbours_for(const FullyShardOptions& options, const DeviceMesh& mesh);

/// Makes the modules one unit, after the submodules that the policy names.
void apply(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options);

}  // namespace tessera::sharded
