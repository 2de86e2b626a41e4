#include "parallel/parameters.h"

#include <tessera/parallelize.h>

#include "dtensor/part.h"
#include "parallel/boundary.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>

/// Parameters whose rows are in the order of ranks. See Note [packed rows].
namespace tessera::parallel {

// Note [packed rows]
// The rows of a fused query-key-value weight are q, then k, then v. Cut into chunks, a rank would
// get rows of one of them. So they are put into another order before they are cut: the rank's rows
// of q, of k and of v, then the next rank's. Each chunk is then a small fused weight, and code that
// splits its output in three works unchanged. The order depends on the number of ranks and can't be
// told from the tensor, so the tensor is remembered as packed (dtensor/part.h): another
// module that shares it must want the same, and load_state_dict wants to be told.

/// Reorders a plain parameter, and its gradient, in place and remembers it.
void pack_parameter(const at::Tensor& parameter, int64_t packed, int64_t ranks);

}  // namespace tessera::parallel

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

namespace tessera::parallel {
namespace {

void check_shared(const StyleTarget& target, const char* style, const ParameterLayout& layout,
                  const at::Tensor& parameter) {
  const auto present = DTensor::of(parameter);
  const auto name = target.path.empty() ? layout.name : target.path + "." + layout.name;
  TORCH_CHECK_VALUE(!dtensor::part_of(present).owner, "parallelize_module: ", style, " expected '",
                    name,
                    "' not to be sharded yet, but fully_shard has been applied to it; call "
                    "parallelize_module first, then fully_shard");
  TORCH_CHECK_VALUE(
      present.mesh() == target.mesh &&
          are_equal(present.placements()[0], layout.placement, present.dim()),
      "parallelize_module: ", style, " expected '", name, "' to be ", c10::str(layout.placement),
      " over ", c10::str(target.mesh), ", but it is distributed already, as ",
      c10::str(present.placements()), " over ", c10::str(present.mesh()),
      "; modules that share a parameter need styles that place it alike, such as RowwiseParallel "
      "for an embedding and ColwiseParallel for the head tied to it");
  TORCH_CHECK_VALUE(dtensor::packed_parts(parameter) == layout.packed,
                    "parallelize_module: ", style, " expected '", name,
                    "' to have its rows packed in ", layout.packed,
                    " parts, but another module that shares it has packed them in ",
                    dtensor::packed_parts(parameter), "; give both styles the same `packed`");
}

void distribute_one(const StyleTarget& target, const char* style, const ParameterLayout& layout,
                    const at::Tensor& parameter) {
  if (is_dtensor(parameter)) return check_shared(target, style, layout, parameter);
  if (layout.packed > 1) pack_parameter(parameter, layout.packed, target.mesh.size());
  distribute_tensor_(parameter, target.mesh, {layout.placement}, target.src_data_rank);
}

}  // namespace

void distribute_parameter(const StyleTarget& target, const char* style,
                          const ParameterLayout& layout, const at::Tensor& used) {
  const auto parameters = target.module.named_parameters(/*recurse=*/false);
  const auto* registered = parameters.find(layout.name);
  const bool is_there = registered != nullptr && registered->defined();
  if (is_there) distribute_one(target, style, layout, *registered);
  if (used.defined() && !(is_there && used.is_same(*registered)))
    distribute_one(target, style, layout, used);
}

void replicate_parameters(const StyleTarget& target, const char* style) {
  for (const auto& item : target.module.named_parameters(/*recurse=*/false))
    distribute_parameter(target, style, {item.key().c_str(), Replicate()});
  const auto prefix = target.path.empty() ? "" : target.path + ".";
  for (const auto& child : target.module.named_children())
    replicate_parameters({*child.value(), target.mesh, prefix + child.key(), target.src_data_rank},
                         style);
}

void check_heads(const StyleTarget& target, const char* style, int64_t features, int64_t heads,
                 int64_t packed) {
  TORCH_CHECK_VALUE(heads >= 0 && packed >= 1, "parallelize_module: ", style,
                    " expected heads >= 0 and packed >= 1 for ", describe(target), ", got ", heads,
                    " and ", packed);
  TORCH_CHECK_VALUE(features % packed == 0, "parallelize_module: ", style, " expected the ",
                    features, " output features of ", describe(target), " to be ", packed,
                    " equal parts; correct `packed`");
  const int64_t ranks = target.mesh.size();
  if (heads > 0) {
    TORCH_CHECK_VALUE(features / packed % heads == 0, "parallelize_module: ", style,
                      " expected the ", features / packed, " features of ", describe(target),
                      " to be ", heads, " heads of equal size; correct `heads`");
    TORCH_CHECK_VALUE(heads % ranks == 0, "parallelize_module: ", style, " expected the ", heads,
                      " heads of ", describe(target), " to be divisible by the ", ranks,
                      " ranks of ", c10::str(target.mesh),
                      "; take a number of ranks that divides them, or leave the module out of the "
                      "plan");
  } else if (packed > 1) {
    TORCH_CHECK_VALUE(features / packed % ranks == 0, "parallelize_module: ", style,
                      " expected each of the ", packed, " packed parts of ", describe(target),
                      ", of ", features / packed, " features, to be divisible by the ", ranks,
                      " ranks of ", c10::str(target.mesh));
  }
}

}  // namespace tessera::parallel
