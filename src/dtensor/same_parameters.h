#pragma once

#include <tessera/comm.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tessera::dtensor {

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
