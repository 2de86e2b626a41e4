// Programs of a step in a parallel mode: which of them all ranks have for a call, and what they
// give back.
#include <tessera/dtensor.h>

#include "compiler/step_impl.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>
#include <utility>

namespace tessera::detail {

using compiler::CallShape;
using compiler::Variant;

void Step::Impl::tell(const ParallelCall& call) {
  for (const auto& note : call.notes) {
    if (std::find(log.begin(), log.end(), note) == log.end()) log.push_back(note);
  }
  if (call.warnings.empty() || std::exchange(has_warned_of_mixing, true)) return;
  std::string text;
  for (const auto& warning : call.warnings) text += (text.empty() ? "" : "; ") + warning;
  TORCH_WARN(text, ". DataParallelSemantics::OneDevice computes it of the whole batch");
}

std::vector<at::Tensor> Step::Impl::placed(const Variant& variant,
                                           std::vector<at::Tensor> results) const {
  const auto known = parallel_calls.find(&variant);
  if (known == parallel_calls.end()) return results;
  const auto& [mesh, placements] = std::tie(known->second.mesh, known->second.results);
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
  if (variants.empty() || parallel_calls.empty()) return nullptr;
  int64_t mine = 0;  // a bit for each that serves this rank
  int64_t bit = 1;
  for (const auto& variant : variants) {
    if (variant.is_ready() && variant.misfit(shape).empty()) mine |= bit;
    bit *= 2;
  }
  auto common = mine;
  if (!agreement.exchange(mine).is_one()) {
    const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
    for (const auto& other : gather_bytes(bytes, parallel_calls.begin()->second.mesh.group())) {
      int64_t theirs = 0;
      std::memcpy(&theirs, other.data(), sizeof theirs);
      common &= theirs;
    }
  }
  if (common == 0) return nullptr;
  return &*std::next(variants.begin(), std::countr_zero(static_cast<uint64_t>(common)));
}

}  // namespace tessera::detail
