#include "dtensor/path.h"

#include <algorithm>
#include <limits>
#include <queue>

namespace tessera::dtensor {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kCollective = 65536;  // bytes that travel in the time it takes to meet
constexpr double kLocalByte = 1e-2;    // copying within a rank, against sending
constexpr double kChange = 1;          // of two free ways the shorter

class Search {
 public:
  Search(const Layout& layout, const Placements& from, const Placements& to)
      : layout_(layout), from_(from), to_(to) {
    for (const auto* placements : {&from, &to}) {
      for (const auto& placement : *placements) {
        if (placement.is_shard()) add_dim(placement.dim());
      }
    }
  }

  Path run() {
    visited_.push_back({from_, 0, -1, {}, false});
    while (true) {
      const auto nearest = take_nearest();
      if (nearest < 0) return {{}, kInfinite};
      if (visited_[nearest].placements == to_) return path_to(nearest);
      for (size_t mesh_dim = 0; mesh_dim < from_.size(); ++mesh_dim) expand(nearest, mesh_dim);
    }
  }

 private:
  struct State {
    Placements placements;
    double cost;
    int previous;
    Step step;
    bool is_done;
  };

  void add_dim(int64_t tensor_dim) {
    if (std::find(dims_.begin(), dims_.end(), tensor_dim) == dims_.end())
      dims_.push_back(tensor_dim);
  }

  int take_nearest() {
    int nearest = -1;
    for (size_t i = 0; i < visited_.size(); ++i) {
      if (visited_[i].is_done) continue;
      if (nearest < 0 || visited_[i].cost < visited_[nearest].cost) nearest = static_cast<int>(i);
    }
    if (nearest >= 0) visited_[nearest].is_done = true;
    return nearest;
  }

  /// Bytes a rank holds, on average.
  double local_bytes(const Placements& placements) const {
    double bytes = static_cast<double>(layout_.item_bytes);
    for (const auto size : layout_.sizes) bytes *= static_cast<double>(size);
    for (size_t dim = 0; dim < placements.size(); ++dim) {
      if (placements[dim].is_shard()) bytes /= static_cast<double>(layout_.mesh_shape[dim]);
    }
    return bytes;
  }

  void expand(int index, size_t mesh_dim) {
    const auto here = visited_[index].placements;  // a copy: visiting moves the states
    const auto& placement = here[mesh_dim];
    if (placement.is_shard() &&
        shard_order(here, layout_.mesh_shape, placement.dim()).back() != mesh_dim)
      return;
    if (!placement.is_replicate()) visit(index, mesh_dim, Replicate());
    for (const auto dim : dims_) {
      if (placement.is_shard(dim)) continue;
      auto without = here;
      without[mesh_dim] = Replicate();
      visit(index, mesh_dim, shard_last(without, layout_.mesh_shape, mesh_dim, dim));
    }
    const auto& goal = to_[mesh_dim];
    if (!goal.is_partial()) return;
    // The whole is no product of copies of itself.
    if (goal.reduce_op() == ReduceOp::PRODUCT && layout_.mesh_shape[mesh_dim] > 1) return;
    if (placement.is_replicate() || (placement.is_shard() && fills_with_zeros(goal)))
      visit(index, mesh_dim, goal);
  }

  double cost_of(const Placements& here, size_t mesh_dim, const Placement& to) const {
    const auto& from = here[mesh_dim];
    const double ranks = static_cast<double>(layout_.mesh_shape[mesh_dim]);
    const double bytes = local_bytes(here);
    if (ranks == 1) return kChange;
    if (from.is_replicate()) return kChange + kLocalByte * bytes / ranks;
    if (to.is_partial()) return kChange + kLocalByte * bytes * ranks;  // zeros around the chunk
    const double share = (ranks - 1) / ranks;
    if (from.is_shard() && to.is_replicate())
      return kCollective + bytes * ranks * share;  // all-gather
    if (from.is_partial() && to.is_replicate()) return kCollective + 2 * bytes * share;
    return kCollective + bytes * share;  // all-to-all, reduce-scatter
  }

  void visit(int previous, size_t mesh_dim, const Placement& to) {
    auto placements = visited_[previous].placements;
    const Step step{mesh_dim, placements[mesh_dim], to};
    const double cost = visited_[previous].cost + cost_of(placements, mesh_dim, to);
    placements[mesh_dim] = to;
    const auto known = std::find_if(visited_.begin(), visited_.end(), [&](const State& state) {
      return state.placements == placements;
    });
    if (known == visited_.end()) {
      visited_.push_back({std::move(placements), cost, previous, step, false});
    } else if (!known->is_done && cost < known->cost) {
      *known = {std::move(placements), cost, previous, step, false};
    }
  }

  Path path_to(int index) const {
    Path path{{}, visited_[index].cost};
    for (; visited_[index].previous >= 0; index = visited_[index].previous)
      path.steps.push_back(visited_[index].step);
    std::reverse(path.steps.begin(), path.steps.end());
    return path;
  }

  const Layout layout_;
  const Placements& from_;
  const Placements& to_;
  std::vector<int64_t> dims_;  // tensor dimensions that may be sharded on the way
  std::vector<State> visited_;
};

}  // namespace

bool fills_with_zeros(const Placement& placement) {
  return placement.is_partial() &&
         (placement.reduce_op() == ReduceOp::SUM || placement.reduce_op() == ReduceOp::BXOR);
}

Path find_path(const Layout& layout, const Placements& from, const Placements& to) {
  if (from == to) return {};
  return Search(layout, from, to).run();
}

}  // namespace tessera::dtensor
