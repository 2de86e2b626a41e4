#include "dtensor/redistribute.h"

#include "base/same_storage.h"
#include "comm/call_check.h"
#include "dtensor/collectives.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>

namespace tessera::dtensor {
namespace {

std::string name_of(const Placement& placement) {
  return placement.is_shard()     ? "Shard(" + std::to_string(placement.dim()) + ")"
         : placement.is_partial() ? "Partial"
                                  : "Replicate";
}

/// One walk along a path: the part and where it is placed at present.
class Walk {
 public:
  Walk(at::Tensor local, const Spec& from, c10::IntArrayRef sizes)
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

at::Tensor run_path(const Path& path, at::Tensor local, const Spec& from, c10::IntArrayRef sizes) {
  Walk walk(std::move(local), from, sizes);
  for (const auto& step : path.steps) walk.arrive(walk.begin(step));
  return walk.local();
}

std::function<at::Tensor()> start_path(const Path& path, const at::Tensor& local, const Spec& from,
                                       c10::IntArrayRef sizes) {
  Walk walk(local, from, sizes);
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

Path require_path(const char* caller, const Spec& from, const Spec& to, c10::IntArrayRef sizes,
                  int64_t item_bytes) {
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

}  // namespace tessera::dtensor
