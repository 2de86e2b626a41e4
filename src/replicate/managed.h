#pragma once

#include "replicate/iteration.h"

namespace tessera::replication {

/// A parameter belongs to one engine. Throws, naming it and both modules, if one has another.
void remember_managed(const ManagedParameters& parameters, const std::string& module_name);
bool is_managed(const at::Tensor& parameter);
void forget_managed(const std::vector<at::Tensor>& parameters);

}  // namespace tessera::replication
