#include "optim/newton_schulz.h"

#include <tessera/dtensor.h>

#include "dtensor/part.h"

#include <ATen/Tensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <c10/util/irange.h>

namespace tessera::optim {
namespace {

at::Tensor iterated(at::Tensor matrix, const NewtonSchulz& iteration) {
  const auto [a, b, c] = iteration.coefficients;
  const auto dtype = iteration.are_products_wide ? at::kFloat : at::kBFloat16;
  // Each result is rounded to bfloat16 either way.
  const auto rounded = [&](const at::Tensor& result) { return result.to(at::kBFloat16).to(dtype); };
  matrix = matrix.to(dtype);
  for (int64_t i = 0; i < iteration.steps; ++i) {
    const at::Tensor gram = rounded(at::mm(matrix, matrix.t()));
    const at::Tensor inner = rounded(at::addmm(gram, gram, gram, b, c));
    matrix = rounded(at::addmm(matrix, inner, matrix, a));
  }
  return matrix.to(at::kBFloat16);
}

/// [matrices, rows, columns]
at::Tensor iterated_together(at::Tensor batch, const NewtonSchulz& iteration) {
  const auto [a, b, c] = iteration.coefficients;
  for (int64_t i = 0; i < iteration.steps; ++i) {
    const at::Tensor gram = at::bmm(batch, batch.mT());
    batch = at::baddbmm(batch, at::baddbmm(gram, gram, gram, b, c), batch, a);
  }
  return batch;
}

dtensor::SpecPtr spec_of(const at::Tensor& tensor) { return dtensor::part_of(tensor).spec; }

at::Tensor wrap_whole(at::Tensor local, const dtensor::SpecPtr& spec,
                      const std::vector<int64_t>& sizes) {
  return dtensor::wrap(std::move(local), spec, sizes, at::detail::defaultStrides(sizes));
}

/// Of a stack of matrices that are placed by `placements`.
Placements of_stack(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_shard())
      placement = placement.is_strided()
                      ? StridedShard(placement.dim() + 1, placement.split_factor())
                      : Shard(placement.dim() + 1);
  }
  return placements;
}

/// Whole matrices on the ranks that share shards.
Placements dealt_out(Placements placements) {
  for (Placement& placement : placements)
    if (placement.is_shard()) placement = Shard(0);
  return placements;
}

at::Tensor moved(const at::Tensor& tensor, const Placements& placements) {
  return DTensor::of(tensor).redistribute(placements);
}

}  // namespace

bool has_bfloat16_products() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

std::vector<at::Tensor> orthogonalized(at::TensorList matrices, const NewtonSchulz& iteration) {
  const bool are_batched = matrices.size() > 1 && !matrices[0].is_cpu();
  return orthogonalized(matrices, iteration, are_batched);
}

std::vector<at::Tensor> orthogonalized(at::TensorList matrices, const NewtonSchulz& iteration,
                                       bool are_batched) {
  if (matrices.empty()) return {};
  const bool is_tall = matrices[0].size(0) > matrices[0].size(1);
  std::vector<at::Tensor> results;
  for (const at::Tensor& matrix : matrices) {
    const at::Tensor half = matrix.to(at::kBFloat16);
    const at::Tensor wide = is_tall ? half.t() : half;
    // At most 1 are then all singular values.
    results.push_back(wide.div(wide.norm().clamp(iteration.eps)));
    if (!are_batched) results.back() = iterated(results.back(), iteration);
  }
  if (are_batched) results = iterated_together(at::stack(results), iteration).unbind(0);
  for (at::Tensor& result : results)
    if (is_tall) result = result.t();
  return results;
}

std::vector<at::Tensor> orthogonalized_in_shares(at::TensorList matrices,
                                                 const NewtonSchulz& iteration) {
  const dtensor::SpecPtr spec = spec_of(matrices[0]);
  if (!spec->is_member) return matrices.vec();
  std::vector<at::Tensor> results;
  if (matrices.size() == 1 || spec->is_replicated) {
    // One group can't be dealt: all have it whole, and cut their part of the result.
    std::vector<at::Tensor> whole;
    for (const at::Tensor& matrix : matrices)
      whole.push_back(DTensor::of(matrix.to(at::kBFloat16)).full_tensor());
    for (const at::Tensor& result : orthogonalized(whole, iteration))
      results.push_back(distribute_tensor(result.contiguous(), spec->mesh, spec->placements,
                                          /*src_data_rank=*/std::nullopt));
    return results;
  }
  std::vector<at::Tensor> parts;
  for (const at::Tensor& matrix : matrices)
    parts.push_back(dtensor::part_of(matrix).local().to(at::kBFloat16));
  const std::vector<int64_t> sizes = {static_cast<int64_t>(matrices.size()), matrices[0].size(0),
                                      matrices[0].size(1)};
  const Placements sharded = of_stack(spec->placements);
  const auto stack = wrap_whole(at::stack(parts), dtensor::make_spec(spec->mesh, sharded), sizes);
  const at::Tensor dealt = moved(stack, dealt_out(sharded));
  at::Tensor share = dtensor::part_of(dealt).local();
  if (share.size(0) > 0) share = at::stack(orthogonalized(share.unbind(0), iteration));
  const at::Tensor back = moved(wrap_whole(share, spec_of(dealt), sizes), sharded);
  for (const at::Tensor& part : dtensor::part_of(back).local().unbind(0))
    results.push_back(wrap_whole(part, spec, {sizes[1], sizes[2]}));
  return results;
}

}  // namespace tessera::optim
