#pragma once

#include <tessera/pipeline.h>

#include <vector>

/// The chain of modules, cut.
namespace tessera::detail::pipeline {

/// Index of the child at which each stage begins. Throws a ValueError in the name of pipeline().
std::vector<size_t> find_borders(const torch::nn::SequentialImpl& net,
                                 const PipelineOptions& options, size_t stages);

/// Throws unless the group's other ranks were given the same net, borders and table.
void check_agreement(const torch::nn::SequentialImpl& net, const std::vector<size_t>& borders,
                     const PipelineTable& table, const PipelineOptions& options,
                     const Group& group);

/// This rank's stages, in their order. Tensors of others become distributed ones of which this rank
/// has nothing, in place: names and shapes stay, memory is freed, and whoever saves or loads finds
/// nothing to do here. Not collective.
std::vector<nn::Sequential> take_stages(torch::nn::SequentialImpl& net,
                                        const std::vector<size_t>& borders,
                                        const PipelineTable& table, const PipelineOptions& options,
                                        const Group& group);

}  // namespace tessera::detail::pipeline
