#pragma once

#include <tessera/dtensor.h>
#include <tessera/parallel/styles.h>

#include <functional>
#include <optional>
#include <string>

/// Where plain tensors and distributed ones meet: what goes into a module, and what comes out.
namespace tessera::parallel {

/// "'blocks.0.up' (torch::nn::LinearImpl)", for messages.
std::string describe(const StyleTarget& target);

/// Throws, naming the module and the remedy, if calls of it can't be hooked.
void require_hookable(const StyleTarget& target, const char* style);

/// Who speaks in messages of a call that comes later.
struct Reporter {
  const char* style;
  std::string module;  // described
};

/// Global sizes of a plain tensor that is this rank's part along the last dimension; none: the
/// ranks compare theirs.
using GlobalSizes = std::function<std::vector<int64_t>(const at::Tensor& local)>;

/// A tensor as a distributed one: a plain one is understood as placed so. Collective if that is
/// sharded and `whole` does not tell of what.
DTensor as_distributed(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& placement,
                       const Reporter& reporter, const GlobalSizes& whole = {});

/// The same tensor, at `placement`.
DTensor placed_at(const DTensor& tensor, const Placement& placement, bool async_op = false);

bool are_equal(const Placement& left, const Placement& right, int64_t ndim);

/// The first argument of a call, which must be a tensor.
at::Tensor& first_tensor(nn::Arguments& arguments, const Reporter& reporter);
/// The result of a call, which must be a tensor.
at::Tensor& only_tensor(nn::Result& result, const Reporter& reporter);

}  // namespace tessera::parallel
