#pragma once

#include <ATen/core/Tensor.h>

#include <string>

/// Values of dicts, put where a module's tensors are.
namespace tessera::state {

/// Throws a ValueError in the name of `function` if a distributed value can't be moved to where
/// `target` is: ranks of one would not be ranks of the other.
void check_mesh(const char* function, const std::string& name, const at::Tensor& target,
                const at::Tensor& given);

/// Throws a ValueError if a plain value is given for a parameter whose rows are packed in another
/// order: it does not say in which order its rows are.
void check_packed(const char* function, const std::string& name, const at::Tensor& target,
                  const at::Tensor& given, bool is_local);

/// The value placed as `target` is. A plain one is the whole, on every rank, or, if `is_local`,
/// this rank's part. Collective if it is distributed.
at::Tensor placed_like(const at::Tensor& target, const at::Tensor& given, bool is_local);

}  // namespace tessera::state
