#include "parallel/parameters.h"

#include "dtensor/packed_rows.h"
#include "dtensor/part.h"
#include "parallel/boundary.h"
#include "parallel/packed.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

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
