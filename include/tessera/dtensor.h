#pragma once

#include <tessera/dtensor/placement.h>
#include <tessera/mesh.h>
#include <tessera/nn/arguments.h>
#include <tessera/nn/module_ref.h>

#include <functional>
#include <optional>

/// Distributed tensors: one global tensor, of which each rank of a mesh holds a part. Every
/// operator of libtorch takes them and autograd differentiates through them. All ranks of the mesh
/// make the same calls in the same order: a call may communicate.
///
/// For the whole process: the first one takes the dispatch key PrivateUse3; if another library has
/// it, that is an error. Plain tensors never reach it.
namespace tessera {

/// The part of a tensor that one rank holds.
struct TensorShard {
  std::vector<int64_t> offset;  // of its first element
  std::vector<int64_t> length;  // along each dimension; 0: it holds nothing
  int owner = 0;                // world rank
};

struct FromLocalOptions {
  /// Compare shapes and dtypes of all ranks first, and replace replicated parts by those of the
  /// first rank. Collective.
  bool run_check = false;
  /// Of the global tensor: both or neither. Needed if shards are uneven; otherwise every shard is
  /// taken to be of this rank's size, and ranks that differ get an error on all of them at the next
  /// operator that communicates (over shm and gloo).
  std::optional<std::vector<int64_t>> shape = std::nullopt;
  std::optional<std::vector<int64_t>> stride = std::nullopt;
  /// Where the gradient shall be before its local part is returned. None: as the tensor, Replicate
  /// for Partial.
  std::optional<Placements> grad_placements = std::nullopt;
};

/// An at::Tensor whose sizes are global. Copies are cheap and mean the same tensor; `DTensor::of`
/// gives this type back to a tensor that went through an operator or a module.
class DTensor : public at::Tensor {
 public:
  DTensor() = default;
  /// The same tensor; a TypeError if it is not distributed.
  static DTensor of(const at::Tensor& tensor);

  /// The tensor of which `local` is this rank's part. No communication unless `run_check`.
  /// Differentiable. Empty placements: Replicate on every mesh dimension.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                            Placements placements = {}, FromLocalOptions options = {});
  /// This rank's part, sharing its memory. Differentiable: the gradient is understood to be placed
  /// as `grad_placements`, or as this tensor (Replicate where it is Partial).
  at::Tensor to_local(const std::optional<Placements>& grad_placements = std::nullopt) const;
  /// The same tensor, placed otherwise, by the fewest bytes over the fewest collectives.
  /// Differentiable. `async_op`: the result waits at its first use.
  DTensor redistribute(Placements placements, bool async_op = false) const;
  DTensor redistribute(const DeviceMesh& mesh, Placements placements, bool async_op = false) const;
  /// The whole tensor, on every rank, as an ordinary one. Differentiable.
  at::Tensor full_tensor(const std::optional<Placements>& grad_placements = std::nullopt) const;

  const DeviceMesh& mesh() const;
  const Placements& placements() const;
  /// Who holds what, in the order of the mesh's ranks.
  std::vector<TensorShard> shards() const;

  /// Global shape, dtype, mesh, placements and this rank's part.
  friend std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

 private:
  explicit DTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {}
};

bool is_dtensor(const at::Tensor& tensor);

/// Distributes a leaf tensor that every rank has, of one shape and dtype, of which that of rank
/// `src_data_rank` along each mesh dimension counts and is sent part by part; none: each rank cuts
/// its own, without communication. A parameter is not changed: the result is a new tensor.
/// Collective; ranks that differ in shape, dtype, placements or source get an error on all of them,
/// except where nothing is sent.
DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                          Placements placements = {}, std::optional<int> src_data_rank = 0);
/// The same in place: `tensor` itself becomes distributed, and whoever holds it (members of a
/// module, optimizers) holds the distributed tensor.
void distribute_tensor_(at::Tensor tensor, const DeviceMesh& mesh, Placements placements = {},
                        std::optional<int> src_data_rank = 0);

/// Called for every submodule with its dotted name; distributes its parameters by
/// distribute_tensor_.
using PartitionFunction =
    std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;
using InputFunction = std::function<void(torch::nn::Module& module, nn::Arguments& arguments,
                                         const DeviceMesh& mesh)>;
using OutputFunction =
    std::function<void(torch::nn::Module& module, nn::Result& result, const DeviceMesh& mesh)>;

namespace detail {
void distribute(torch::nn::Module& module, const DeviceMesh& mesh,
                const PartitionFunction& partition, InputFunction input, OutputFunction output);
}

/// Distributes the parameters and buffers of a module: `partition` where it does, the rest as
/// Replicate. `input` and `output` run around its forward. Once per module; collective. What was
/// given is returned.
template <nn::ModuleLike M>
M distribute_module(M&& module, const DeviceMesh& mesh, const PartitionFunction& partition = {},
                    InputFunction input = {}, OutputFunction output = {}) {
  detail::distribute(nn::as_module(module), mesh, partition, std::move(input), std::move(output));
  return std::forward<M>(module);
}

namespace dtensor {

/// Random ones equal the one-device result for the same seed, however they are placed.
DTensor zeros(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements = {},
              const at::TensorOptions& options = {});
DTensor ones(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements = {},
             const at::TensorOptions& options = {});
DTensor full(at::IntArrayRef size, const at::Scalar& value, const DeviceMesh& mesh,
             Placements placements = {}, const at::TensorOptions& options = {});
DTensor empty(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements = {},
              const at::TensorOptions& options = {});
DTensor rand(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements = {},
             const at::TensorOptions& options = {});
DTensor randn(at::IntArrayRef size, const DeviceMesh& mesh, Placements placements = {},
              const at::TensorOptions& options = {});

}  // namespace dtensor
}  // namespace tessera

#include <tessera/dtensor/tools.h>
