#include "parallel/packed.h"

#include <tessera/parallelize.h>

#include "dtensor/packed_rows.h"

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace tessera {
namespace parallel {
namespace {

/// Which row of the module's order comes at each place of the ranks' order: [rows].
at::Tensor row_order(const char* caller, const at::Tensor& whole, int64_t packed, int64_t ranks) {
  TORCH_CHECK_VALUE(
      whole.dim() > 0 && packed > 0 && ranks > 0 && whole.size(0) % (packed * ranks) == 0, caller,
      ": expected rows that ", packed, " parts and ", ranks,
      " ranks divide evenly, got a tensor of sizes ", whole.sizes());
  return at::arange(whole.size(0), whole.options().dtype(at::kLong).requires_grad(false))
      .view({packed, ranks, -1})
      .transpose(0, 1)
      .reshape({-1});
}

}  // namespace

void pack_parameter(const at::Tensor& parameter, int64_t packed, int64_t ranks) {
  const at::NoGradGuard no_grad;
  parameter.copy_(pack_rows(parameter, packed, ranks));
  if (parameter.grad().defined())
    parameter.grad().copy_(pack_rows(parameter.grad(), packed, ranks));
  dtensor::remember_packed(parameter, {.parts = packed, .ranks = ranks});
}

}  // namespace parallel

at::Tensor pack_rows(const at::Tensor& whole, int64_t packed, int64_t ranks) {
  return whole.index_select(0, parallel::row_order("pack_rows", whole, packed, ranks));
}

at::Tensor unpack_rows(const at::Tensor& whole, int64_t packed, int64_t ranks) {
  const auto order = parallel::row_order("unpack_rows", whole, packed, ranks);
  return whole.index_select(0, order.argsort());
}

}  // namespace tessera
