#pragma once

#include <tessera/comm.h>

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

/// What ranks compare before they rely on each other's tensors. Collective over the mesh.
namespace tessera::dtensor {

/// Global sizes from those of all ranks' parts; throws on all ranks alike if these do not make up
/// one tensor by the chunk rule, or if dtypes differ. `wrong`: what this rank knows to be wrong
/// already, for all to throw.
Sizes agreed_sizes(const at::Tensor& local, const Spec& spec, std::string wrong = {});
/// The first rank's values wherever the placement says that all hold the same; without history.
at::Tensor agreed_values(const at::Tensor& local, const Spec& spec);
/// Throws on all ranks of the mesh alike if shape or dtype of a tensor that all hold, or the
/// placements or source they give, differ.
void check_same(const char* caller, const at::Tensor& tensor, const Spec& spec, int source);

/// What ranks compare of a parameter: name, sizes, strides and dtype.
std::string describe_parameter(const std::string& name, const at::Tensor& parameter);
/// Which part of a distributed parameter this rank holds; nothing for a plain one. Ranks that hold
/// different parts hold no copies of one parameter.
std::string describe_part(const at::Tensor& parameter);

struct Compared {
  const char* caller;                        // whose error it is
  std::string kind;                          // what `whole` describes: "options"
  std::string whole;                         // one line
  std::vector<std::string> parameters = {};  // one line each
};
/// Throws on every rank, naming the first parameter that differs, unless all ranks of the group
/// have the same. Every rank of the group calls it.
void check_same_parameters(const Compared& own, const Group& group);

}  // namespace tessera::dtensor
