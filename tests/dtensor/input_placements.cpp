#include "dtensor/input_placements.h"

#include <torch/torch.h>

#include <algorithm>

namespace tessera::brute_force {
namespace {

constexpr ReduceOp::RedOpType kReductions[] = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX,
                                               ReduceOp::MIN};

/// Placements to try for one input on one mesh dimension.
std::vector<Placement> choices_for(const at::Tensor& input) {
  std::vector<Placement> choices{Replicate()};
  for (int64_t dim = 0; dim < input.dim(); ++dim) choices.push_back(Shard(dim));
  if (input.is_floating_point()) choices.push_back(Partial());
  return choices;
}

/// All placements of all inputs, as numbers in mixed radix.
class Combinations {
 public:
  Combinations(const std::vector<at::Tensor>& inputs, size_t mesh_ndim) : mesh_ndim_(mesh_ndim) {
    for (const auto& input : inputs) {
      for (size_t dim = 0; dim < mesh_ndim; ++dim) choices_.push_back(choices_for(input));
    }
    for (const auto& choices : choices_) count_ *= static_cast<int64_t>(choices.size());
  }
  int64_t count() const { return count_; }
  std::vector<Placements> at(int64_t number) const {
    std::vector<Placements> result;
    for (size_t i = 0; i < choices_.size(); ++i) {
      if (i % mesh_ndim_ == 0) result.emplace_back();
      const auto radix = static_cast<int64_t>(choices_[i].size());
      result.back().push_back(choices_[i][number % radix]);
      number /= radix;
    }
    return result;
  }

 private:
  size_t mesh_ndim_;
  std::vector<std::vector<Placement>> choices_;
  int64_t count_ = 1;
};

size_t below(size_t bound, std::mt19937_64& random) { return random() % bound; }

Placements draw_wide(const at::Tensor& input, const std::vector<int64_t>& mesh_shape,
                     std::mt19937_64& random) {
  if (mesh_shape.size() == 2 && mesh_shape[1] > 1 && input.dim() > 0 && below(4, random) == 0) {
    const auto dim = static_cast<int64_t>(below(input.dim(), random));
    return {StridedShard(dim, mesh_shape[1]), Shard(dim)};
  }
  // One reduction per tensor: a maximum of sums is no sum of maxima.
  const auto op = kReductions[below(std::size(kReductions), random)];
  auto choices = choices_for(input);
  if (choices.back().is_partial()) {
    choices.back() = Partial(op);
    choices.push_back(Partial(op));  // twice: it is what the common range lacks
  }
  Placements placements;
  for (size_t dim = 0; dim < mesh_shape.size(); ++dim)
    placements.push_back(choices[below(choices.size(), random)]);
  return placements;
}

at::Tensor chunk(const at::Tensor& tensor, int64_t tensor_dim, int64_t ranks, int64_t rank) {
  const int64_t size = tensor.size(tensor_dim);
  const int64_t each = (size + ranks - 1) / ranks;
  const int64_t begin = std::min(size, each * rank);
  return tensor.narrow(tensor_dim, begin, std::min(each, size - begin));
}

/// What `rank` adds to the reduction.
at::Tensor operand_for(const at::Tensor& whole, ReduceOp::RedOpType op, int64_t ranks,
                       int64_t rank) {
  if (op == ReduceOp::SUM || op == ReduceOp::AVG) {
    const double rest = 1.0 - 0.25 * static_cast<double>(ranks - 1);
    return whole * ((rank == 0 ? rest : 0.25) * (op == ReduceOp::AVG ? ranks : 1));
  }
  const auto owner = at::arange(whole.numel()).remainder(ranks).view(whole.sizes());
  const double distance = op == ReduceOp::MAX ? -0.1 : 0.1;
  return at::where(owner == rank, whole, whole + distance * whole.abs());
}

}  // namespace

std::vector<std::vector<Placements>> placements_to_try(const std::vector<at::Tensor>& inputs,
                                                       const std::vector<int64_t>& mesh_shape,
                                                       Range range, double share,
                                                       std::mt19937_64& random) {
  const auto part_of = [&](int64_t draws, int64_t least) {
    return std::max(least, static_cast<int64_t>(share * static_cast<double>(draws)));
  };
  std::vector<std::vector<Placements>> all;
  if (range == Range::Wide) {
    for (int64_t i = 0; i < part_of(40, 1); ++i) {
      all.emplace_back();
      for (const auto& input : inputs) all.back().push_back(draw_wide(input, mesh_shape, random));
    }
    return all;
  }
  const Combinations combinations(inputs, mesh_shape.size());
  const auto draws = part_of(200, 2);
  const bool wants_all = share >= 1 && (mesh_shape.size() == 1 || inputs.size() <= 2);
  if (wants_all || draws >= combinations.count()) {
    for (int64_t i = 0; i < combinations.count(); ++i) all.push_back(combinations.at(i));
  } else {
    const auto count = static_cast<size_t>(combinations.count());
    for (int64_t i = 0; i < draws; ++i)
      all.push_back(combinations.at(static_cast<int64_t>(below(count, random))));
  }
  return all;
}

at::Tensor part_for(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  auto part = whole;
  const auto each = [&](const auto& use) {
    for (size_t i = 0; i < placements.size(); ++i) {
      const auto mesh_dim = static_cast<int64_t>(i);
      use(placements[i], mesh.size(mesh_dim), mesh.local_rank(mesh_dim));
    }
  };
  const auto cut = [&](bool is_strided) {
    each([&](const Placement& placement, int64_t ranks, int64_t rank) {
      if (placement.is_shard() && placement.is_strided() == is_strided)
        part = chunk(part, placement.dim(), ranks, rank);
    });
  };
  each([&](const Placement& placement, int64_t ranks, int64_t rank) {
    if (placement.is_partial()) part = operand_for(part, placement.reduce_op(), ranks, rank);
  });
  cut(false);
  cut(true);  // strided shards cut after the others
  return part.clone();
}

}  // namespace tessera::brute_force
