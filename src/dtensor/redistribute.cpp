#include "dtensor/redistribute.h"

#include "base/storage.h"
#include "comm/call_check.h"
#include "dtensor/collectives.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

namespace tessera::dtensor {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kCollective = 65536;  // bytes that travel in the time it takes to meet
constexpr double kLocalByte = 1e-2;    // copying within a rank, against sending
constexpr double kChange = 1;          // of two free ways the shorter

class PathSearch {
 public:
  PathSearch(const Layout& layout, const Placements& from, const Placements& to)
      : layout_(layout), from_(from), to_(to) {
    for (const auto* placements : {&from, &to}) {
      for (const auto& placement : *placements) {
        if (placement.is_shard()) add_dim(placement.dim());
      }
    }
  }

  RedistributePath run() {
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

  RedistributePath path_to(int index) const {
    RedistributePath path{{}, visited_[index].cost};
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

RedistributePath find_path(const Layout& layout, const Placements& from, const Placements& to) {
  if (from == to) return {};
  return PathSearch(layout, from, to).run();
}

namespace {

std::string name_of(const Placement& placement) {
  return placement.is_shard()     ? "Shard(" + std::to_string(placement.dim()) + ")"
         : placement.is_partial() ? "Partial"
                                  : "Replicate";
}

/// One walk along a path: the part and where it is placed at present.
class PathRun {
 public:
  PathRun(at::Tensor local, const Spec& from, c10::IntArrayRef sizes)
      : local_(std::move(local)), spec_(from), sizes_(sizes), placements_(from.placements) {}

  /// Steps that need no waiting are done at once.
  Transfer begin(const Step& step) {
    const auto& group = spec_.groups[step.mesh_dim];
    const int64_t ranks = spec_.mesh_shape[step.mesh_dim];
    const auto finish = [&](Transfer transfer) {
      placements_[step.mesh_dim] = step.to;
      return transfer;
    };
    if (ranks == 1) {
      placements_[step.mesh_dim] = step.to;
      return {};
    }
    if (step.from.is_replicate()) {
      take_own(step);
      return {};
    }
    // Ranks that go to other places may send as many bytes.
    const comm::CallNote note(name_of(step.from) + " to " + name_of(step.to));
    if (step.from.is_partial()) {
      return finish(step.to.is_replicate()
                        ? reduce_all(local_, step.from.reduce_op(), group)
                        : reduce_chunks(local_, step.to.dim(), step.from.reduce_op(), group));
    }
    if (step.to.is_partial()) {
      fill_around(step);
      return {};
    }
    const int64_t size = size_without(step);
    return finish(step.to.is_replicate()
                      ? gather_chunks(local_, step.from.dim(), size, group)
                      : exchange_chunks(local_, step.from.dim(), size, step.to.dim(), group));
  }

  void arrive(const Transfer& transfer) {
    if (transfer.pending.defined()) local_ = transfer.wait();
  }

  const at::Tensor& local() const { return local_; }

 private:
  /// Length of the dimension that `step` joins, once it is joined.
  int64_t size_without(const Step& step) const {
    auto without = placements_;
    without[step.mesh_dim] = Replicate();
    const int64_t dim = step.from.dim();
    return local_chunk(sizes_[dim], dim, without, spec_.mesh_shape, spec_.coordinate).length;
  }

  void take_own(const Step& step) {
    const int64_t rank = spec_.coordinate[step.mesh_dim];
    if (step.to.is_shard()) {
      local_ =
          take_chunk(local_, step.to.dim(), spec_.mesh_shape[step.mesh_dim], rank).contiguous();
    } else if (fills_with_zeros(step.to)) {
      if (rank != 0) local_ = at::zeros_like(local_);  // exact, unlike shares
    }
    // One copy counts as much as many for the others: avg, min, max, and, or.
    placements_[step.mesh_dim] = step.to;
  }

  /// A shard as a summand of the whole: zeros where the others have their chunks.
  void fill_around(const Step& step) {
    const int64_t tensor_dim = step.from.dim();
    const int64_t size = size_without(step);
    const auto chunk =
        chunk_of(size, spec_.mesh_shape[step.mesh_dim], spec_.coordinate[step.mesh_dim]);
    std::vector<int64_t> padding(2 * (local_.dim() - tensor_dim), 0);
    padding[padding.size() - 2] = chunk.offset;
    padding.back() = size - chunk.offset - chunk.length;
    local_ = at::constant_pad_nd(local_, padding, 0);
    placements_[step.mesh_dim] = step.to;
  }

  at::Tensor local_;
  const Spec& spec_;
  const c10::IntArrayRef sizes_;
  Placements placements_;
};

}  // namespace

at::Tensor run_path(const RedistributePath& path, at::Tensor local, const Spec& from,
                    c10::IntArrayRef sizes) {
  PathRun walk(std::move(local), from, sizes);
  for (const auto& step : path.steps) walk.arrive(walk.begin(step));
  return walk.local();
}

std::function<at::Tensor()> start_path(const RedistributePath& path, const at::Tensor& local,
                                       const Spec& from, c10::IntArrayRef sizes) {
  PathRun walk(local, from, sizes);
  Transfer last;
  for (const auto& step : path.steps) {
    walk.arrive(last);
    last = walk.begin(step);
  }
  if (!last.pending.defined()) {
    // Whoever writes to the result must not write to the source.
    auto result = same_storage(walk.local(), local) ? walk.local().clone() : walk.local();
    return [result] { return result; };
  }
  return [last] { return last.wait(); };
}

RedistributePath require_path(const char* caller, const Spec& from, const Spec& to,
                              c10::IntArrayRef sizes, int64_t item_bytes) {
  auto path = find_path({sizes, item_bytes, from.mesh_shape}, from.placements, to.placements);
  TORCH_CHECK_NOT_IMPLEMENTED(std::isfinite(path.cost), caller, ": there is no way from ",
                              c10::str(from.placements), " to ", c10::str(to.placements),
                              "; only operators and DTensor::from_local make that");
  return path;
}

at::Tensor redistributed(const char* caller, const at::Tensor& tensor, const SpecPtr& to) {
  auto& part = part_of(tensor);
  if (part.spec == to) return tensor;
  check_one_mesh(caller, *part.spec, *to);
  const auto path = require_path(caller, *part.spec, *to, tensor.sizes(),
                                 static_cast<int64_t>(tensor.itemsize()));
  auto local =
      to->is_member ? run_path(path, part.local(), *part.spec, tensor.sizes()) : part.local();
  return wrap(std::move(local), to, tensor.sizes(), tensor.strides());
}

at::Tensor local_gradient(const char* caller, const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined() || !has_part(parameter)) return gradient;
  const auto& spec = part_of(parameter).spec;
  if (part_of(gradient).spec->id != spec->id)
    parameter.mutable_grad() = redistributed(caller, gradient, spec);
  return part_of(parameter.grad()).local();
}

at::Tensor gradient_of_part(const at::Tensor& parameter, at::Tensor part) {
  if (!has_part(parameter)) return part;
  return wrap(std::move(part), part_of(parameter).spec, parameter.sizes(), parameter.strides());
}

}  // namespace tessera::dtensor
