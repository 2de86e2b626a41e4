// Distributed tensors as operators of Python: torch.ops.load_library(...), then
// torch.ops.tessera_test.….
#include <tessera/dtensor.h>

#include "dtensor/debug.h"

#include <ATen/core/Dict.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <chrono>
#include <optional>
#include <string_view>

namespace tessera::dtensor {
namespace {

void join(const std::string& init_method, int64_t rank, int64_t world_size, int64_t seconds) {
  init({.rank = static_cast<int>(rank),
        .world_size = static_cast<int>(world_size),
        .init_method = init_method,
        .timeout = std::chrono::seconds(seconds)});
}

void leave() { shutdown(); }

/// "R", "S0", "S-1", "Psum", "Pmax"; "P" is "Psum".
Placement parse(const std::string& text) {
  if (text == "R") return Replicate();
  if (text == "P") return Partial();
  if (text.starts_with('P')) return Partial(std::string_view(text).substr(1));
  TORCH_CHECK_VALUE(
      text.size() > 1 && text[0] == 'S',
      "tessera_test::distribute: expected a placement R, P or S followed by a tensor ",
      "dimension, got '", text, "'");
  return Shard(std::stoll(text.substr(1)));
}

std::string to_text(const Placement& placement) {
  if (placement.is_replicate()) return "R";
  const auto name = c10::str(placement);
  TORCH_CHECK_NOT_IMPLEMENTED(!placement.is_strided(), "tessera_test::placements: ", name,
                              " has no short name; redistribute the tensor first");
  if (placement.is_shard()) return c10::str("S", placement.dim());
  const auto open = name.find('(') + 1;  // "Partial(max)"
  return c10::str("P", std::string_view(name).substr(open, name.find(')') - open));
}

Placements parse(const std::vector<std::string>& texts) {
  Placements placements;
  for (const auto& text : texts) placements.push_back(parse(text));
  return placements;
}

at::Tensor distribute(const at::Tensor& tensor, std::vector<int64_t> mesh_shape,
                      const std::vector<std::string>& placements) {
  const auto mesh = init_device_mesh(tensor.device().type(), mesh_shape);
  return distribute_tensor(tensor, mesh, parse(placements), /*src_data_rank=*/std::nullopt);
}

at::Tensor distributed_from_local(const at::Tensor& local, std::vector<int64_t> mesh_shape,
                                  const std::vector<std::string>& placements) {
  const auto mesh = init_device_mesh(local.device().type(), mesh_shape);
  return DTensor::from_local(local, mesh, parse(placements));
}

at::Tensor redistribute_to(const at::Tensor& tensor, const std::vector<std::string>& placements) {
  return DTensor::of(tensor).redistribute(parse(placements));
}

at::Tensor whole_tensor(const at::Tensor& tensor) { return DTensor::of(tensor).full_tensor(); }
at::Tensor local(const at::Tensor& tensor) { return DTensor::of(tensor).to_local(); }
bool is_distributed(const at::Tensor& tensor) { return is_dtensor(tensor); }

std::vector<std::string> placement_names(const at::Tensor& tensor) {
  std::vector<std::string> texts;
  const auto distributed = DTensor::of(tensor);
  for (const auto& placement : distributed.placements()) texts.push_back(to_text(placement));
  return texts;
}

/// Whether plain tensors beside distributed ones count as replicated from now on, in this thread.
void replicate_plain(bool on) {
  thread_local std::optional<ImplicitReplication> scope;
  scope.reset();
  if (on) scope.emplace();
}

/// (calls, of these without a rule, of these with something sharded) since the last time.
std::vector<int64_t> take_counts() {
  thread_local DispatchLog log;
  std::vector<int64_t> counts(3);
  for (const auto& [name, entry] : log.entries()) {
    counts[0] += entry.calls;
    counts[1] += entry.without_rule;
    counts[2] += entry.kept_sharded;
  }
  log.clear();
  return counts;
}

/// Bytes by kind of collective since the last time, as comm_debug counts them.
c10::Dict<std::string, int64_t> take_traffic() {
  thread_local comm_debug traffic;
  c10::Dict<std::string, int64_t> bytes;
  for (const auto& [kind, count] : traffic.counts()) bytes.insert(kind, count.bytes);
  traffic.reset();
  return bytes;
}

TORCH_LIBRARY(tessera_test, library) {
  library.def("init(str init_method, int rank, int world_size, int timeout_seconds) -> ()", join);
  library.def("shutdown() -> ()", leave);
  library.def("distribute(Tensor tensor, int[] mesh_shape, str[] placements) -> Tensor",
              distribute);
  library.def("from_local(Tensor local, int[] mesh_shape, str[] placements) -> Tensor",
              distributed_from_local);
  library.def("redistribute(Tensor tensor, str[] placements) -> Tensor", redistribute_to);
  library.def("full_tensor(Tensor tensor) -> Tensor", whole_tensor);
  library.def("to_local(Tensor tensor) -> Tensor", local);
  library.def("is_dtensor(Tensor tensor) -> bool", is_distributed);
  library.def("replicate_plain(bool on) -> ()", replicate_plain);
  library.def("placements(Tensor tensor) -> str[]", placement_names);
  library.def("take_dispatch_counts() -> int[]", take_counts);
  library.def("take_traffic() -> Dict(str, int)", take_traffic);
}

}  // namespace
}  // namespace tessera::dtensor
