#pragma once

#include <tessera/fully_shard.h>

#include "fully_shard/precision.h"
#include "fully_shard/unit.h"

#include <set>

/// What fully_shard does once, before there is a unit.
namespace tessera::detail::fully_shard {

/// Refuses what the options say of each other and of the mesh, before ranks talk and anything has
/// changed.
void check_options(const FullyShardOptions& options);

/// The mesh that the options name; the same for the same group, so that all units' parameters lie
/// on one.
DeviceMesh mesh_for(const FullyShardOptions& options, c10::DeviceType device);

/// The ranks among which reshard_after_forward, if it is a number, keeps a copy; null if it is
/// none. A collective.
Group neighbours_for(const FullyShardOptions& options, const DeviceMesh& mesh);

struct Ignored {
  std::set<const torch::nn::Module*> modules;
  std::set<const at::TensorImpl*> parameters;
};
/// Throws if both kinds are given, or if a sharded module is among them.
Ignored find_ignored(const torch::nn::Module& module, const FullyShardOptions& options);

/// Visits the modules whose parameters belong to the unit of `module`: not ignored, sharded or
/// replicated parts.
void visit_own(torch::nn::Module& module, const Ignored& ignored,
               const std::function<void(torch::nn::Module&, const std::string& prefix)>& visit);

/// Parameters of the unit; one that is shared in it is taken once. Throws, naming both units, if
/// another unit has one.
std::vector<FoundParameter> find_parameters(const std::vector<torch::nn::Module*>& modules,
                                            const Ignored& ignored,
                                            const MixedPrecision& precision);
/// Asks along which dimensions they are cut.
void choose_dims(std::vector<FoundParameter>& parameters, const FullyShardOptions& options);
/// Parameters belong to a unit until it ends.
void remember_owner(const std::vector<FoundParameter>& parameters, const std::string& unit);
void forget_owner(const std::vector<ShardedParameter>& parameters);

/// Gives memory and values to what was built without. Throws in the name of `function`.
void materialise(const char* function, const std::vector<torch::nn::Module*>& modules,
                 const Ignored& ignored, const FullyShardOptions& options, c10::Device device);
void move_to_device(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                    c10::Device device);
/// Values of the first rank of the mesh, on all.
void broadcast_values(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                      const DeviceMesh& mesh);
/// What mixed precision asks of the modules themselves: their buffers, and the boundaries of those
/// that it leaves alone.
std::vector<CastBuffer> cast_modules(const std::vector<torch::nn::Module*>& modules,
                                     const Ignored& ignored, const MixedPrecision& precision);

}  // namespace tessera::detail::fully_shard
