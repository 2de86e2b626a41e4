#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::comm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

/// Whose tensors a backend takes.
enum class Devices { Cpu, CpuAndCuda, Cuda, Any };

/// Checks of one collective's arguments that c10d's signatures leave to the backend. Errors are
/// ValueError, or TypeError for dtypes, and start with "backend: collective: ".
class ArgumentChecks {
 public:
  ArgumentChecks(const char* backend, const char* collective, int rank, int size, Devices devices)
      : backend_(backend), name_(collective), rank_(rank), size_(size), devices_(devices) {}

  const char* name() const { return name_; }
  /// Defined, dense and on a device of the backend's.
  void check_tensor(const at::Tensor& tensor) const;
  /// As above, and no two elements share memory.
  void check_written(const at::Tensor& tensor) const;
  void check_same_dtype(const at::Tensor& tensor, const at::Tensor& other) const;
  void check_root(int64_t root) const;
  /// A peer to send to or receive from.
  void check_peer(int64_t peer) const;
  /// The one tensor, or the one list, of a signature made for several devices per rank.
  const at::Tensor& only(const Tensors& tensors) const;
  const Tensors& only(const TensorLists& lists) const;
  /// `parts` has one tensor per rank, of the dtype of `like`; of its number of elements too unless
  /// `uneven`.
  void check_parts(const char* what, const Tensors& parts, const at::Tensor& like,
                   bool uneven) const;
  /// `whole` has the elements of `size` tensors like `part`.
  void check_whole(const at::Tensor& whole, const at::Tensor& part) const;
  /// As many of one as of the other.
  void check_pairs(const Tensors& outputs, const Tensors& inputs) const;
  /// A root's list on the root, nothing elsewhere.
  void check_root_list(const char* what, const TensorLists& lists, int64_t root,
                       const at::Tensor& like) const;
  /// Rows of `tensor` for each rank: `splits`, or equal ones if there are none.
  std::vector<int64_t> rows(const char* what, const at::Tensor& tensor,
                            const std::vector<int64_t>& splits) const;
  /// What a rank sends itself arrives whole.
  void check_own_part(int64_t sent, int64_t received) const;

 private:
  const char* backend_;
  const char* name_;
  int rank_;
  int size_;
  Devices devices_;
};

}  // namespace tessera::comm
