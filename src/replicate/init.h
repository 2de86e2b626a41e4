#pragma once

#include "replicate/iteration.h"

#include <torch/csrc/api/include/torch/nn/module.h>

#include <set>

/// What happens once, before the first iteration.
namespace tessera::detail::replicate {

/// Parameters below `module` that need a gradient, depth first; not those of ignored, fully sharded
/// or separately replicated modules. One that is shared is taken once.
struct CollectedParameters {
  ManagedParameters managed;
  ManagedParameters all;  // with the frozen ones: equal on all ranks, too
};
CollectedParameters collect_parameters(const torch::nn::Module& module,
                                       const std::set<const torch::nn::Module*>& ignored);
std::vector<at::Tensor> collect_buffers(const torch::nn::Module& module,
                                        const std::set<const torch::nn::Module*>& ignored);

/// Throws on every rank, naming the first parameter that differs, unless all ranks of the group
/// have the same, and the same `options`.
void verify_parameters(const ManagedParameters& parameters, const std::string& options,
                       const Group& group);
/// Whether it is true on all ranks.
bool agree(bool own, const Group& group);
/// The values of group rank `source`, on all ranks.
void broadcast_values(const std::vector<at::Tensor>& tensors, const Group& group, int source = 0);

/// Indices of parameters that none of `outputs` depends on.
std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs,
                                const std::vector<at::Tensor>& parameters);

/// A parameter belongs to one engine. Throws, naming it and both modules, if one has another.
void remember_managed(const ManagedParameters& parameters, const std::string& module_name);
bool is_managed(const at::Tensor& parameter);
void forget_managed(const std::vector<at::Tensor>& parameters);

}  // namespace tessera::detail::replicate
