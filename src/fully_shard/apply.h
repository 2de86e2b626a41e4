#pragma once

#include "fully_shard/state_impl.h"

namespace tessera::sharded {

/// The mesh that the options name; the same for the same group, so that all units' parameters lie
/// on one.
DeviceMesh mesh_for(const FullyShardOptions& options, c10::DeviceType device);

/// Makes the modules one unit, after the submodules that the policy names.
void apply(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options);

}  // namespace tessera::sharded
