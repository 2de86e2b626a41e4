// Programs of a step in a parallel mode: which of them all ranks have for a call, and what they
// give back.
#include <tessera/dtensor.h>

#include "compiler/programs/step_impl.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cstring>
#include <tuple>
#include <utility>

namespace tessera::detail {

using compiler::CallShape;
using compiler::Variant;

void Step::Impl::tell(const ParallelCall& call) {
  for (const auto& note : call.notes) variants.reasons.note_once(note);
  if (call.warnings.empty() || std::exchange(has_warned_of_mixing, true)) return;
  std::string text;
  for (const auto& warning : call.warnings) text += (text.empty() ? "" : "; ") + warning;
  TORCH_WARN(text, ". DataParallelSemantics::OneDevice computes it of the whole batch");
}

std::vector<at::Tensor> Step::Impl::placed(const Variant& variant,
                                           std::vector<at::Tensor> results) const {
  if (!variant.parallel) return results;
  const auto& [mesh, placements] = std::tie(variant.parallel->mesh, variant.parallel->results);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i] || !results[i].defined()) continue;
    const auto& [placement, sizes] = *placements[i];
    const auto strides = c10::TensorType::contiguousStridesOf(sizes);
    results[i] =
        DTensor::from_local(results[i], mesh, {placement}, {.shape = sizes, .stride = strides});
  }
  return results;
}

compiler::Variant* Step::Impl::find_common(const CallShape& shape) {
  if (variants.empty() || !variants.begin()->parallel) return nullptr;
  int64_t mine = 0;  // a bit for each that serves this rank
  int64_t bit = 1;
  for (const auto& variant : variants) {
    if (variant.is_ready() && variant.misfit(shape).empty()) mine |= bit;
    bit *= 2;
  }
  auto common = mine;
  if (!variants.agreement.exchange(mine).is_one()) {
    const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
    for (const auto& other : gather_bytes(bytes, variants.begin()->parallel->mesh.group())) {
      int64_t theirs = 0;
      std::memcpy(&theirs, other.data(), sizeof theirs);
      common &= theirs;
    }
  }
  if (common == 0) return nullptr;
  return &*std::next(variants.begin(), std::countr_zero(static_cast<uint64_t>(common)));
}

}  // namespace tessera::detail
