#include "comm/argument_checks.h"

#include "comm/type_names.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <numeric>

namespace tessera::comm {

void ArgumentChecks::check_tensor(const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(tensor.defined(), backend_, ": ", name_,
                    ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(devices_ != Devices::Cpu || tensor.is_cpu(), backend_, ": ", name_,
                    ": expected a CPU tensor, got one on ", tensor.device(),
                    "; use the nccl backend for CUDA tensors or move it with .cpu()");
  TORCH_CHECK_VALUE(devices_ != Devices::Cuda || tensor.is_cuda(), backend_, ": ", name_,
                    ": expected a CUDA tensor, got one on ", tensor.device(),
                    "; use the backend \"auto\", which has one for both, or move it with .cuda()");
  TORCH_CHECK_VALUE(devices_ != Devices::CpuAndCuda || tensor.is_cpu() || tensor.is_cuda(),
                    backend_, ": ", name_, ": expected a CPU or CUDA tensor, got one on ",
                    tensor.device(), "; move it with .cpu()");
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, backend_, ": ", name_,
                    ": expected a dense tensor, got layout ", tensor.layout(),
                    "; call .to_dense(), or gather indices and values separately");
}

void ArgumentChecks::check_written(const at::Tensor& tensor) const {
  check_tensor(tensor);
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes, backend_, ": ", name_,
      ": expected a tensor that can be written, got one whose elements share memory (sizes ",
      tensor.sizes(), ", strides ", tensor.strides(), "); call .clone() first");
}

void ArgumentChecks::check_root(int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, backend_, ": ", name_,
                    ": expected a root from 0 to ", size_ - 1, ", got ", root);
}

void ArgumentChecks::check_peer(int64_t peer) const {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_, backend_, ": ", name_,
                    ": expected a peer from 0 to ", size_ - 1, ", got ", peer);
}

const at::Tensor& ArgumentChecks::only(const Tensors& tensors) const {
  TORCH_CHECK_VALUE(tensors.size() == 1, backend_, ": ", name_,
                    ": expected one tensor per rank, got ", tensors.size(),
                    "; use the coalesced form for several");
  check_tensor(tensors[0]);
  return tensors[0];
}

const Tensors& ArgumentChecks::only(const TensorLists& lists) const {
  TORCH_CHECK_VALUE(lists.size() == 1, backend_, ": ", name_,
                    ": expected one list of tensors per rank, got ", lists.size());
  return lists[0];
}

void ArgumentChecks::check_same_dtype(const at::Tensor& tensor, const at::Tensor& other) const {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), backend_, ": ", name_,
                   ": expected tensors of one dtype, got ", name_of_dtype(tensor.scalar_type()),
                   " and ", name_of_dtype(other.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == other.device(), backend_, ": ", name_,
                    ": expected tensors on one device, got ", tensor.device(), " and ",
                    other.device(), "; move one with .to()");
}

void ArgumentChecks::check_parts(const char* what, const Tensors& parts, const at::Tensor& like,
                                 bool uneven) const {
  TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size_, backend_, ": ", name_, ": expected ",
                    size_, " ", what, " tensors, one per rank, got ", parts.size());
  for (const auto& part : parts) {
    check_tensor(part);
    check_same_dtype(like, part);
    TORCH_CHECK_VALUE(uneven || part.numel() == like.numel(), backend_, ": ", name_, ": expected ",
                      what, " tensors of ", like.numel(), " elements, got one of ", part.numel());
  }
}

void ArgumentChecks::check_whole(const at::Tensor& whole, const at::Tensor& part) const {
  check_tensor(whole);
  check_tensor(part);
  check_same_dtype(whole, part);
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size_, backend_, ": ", name_,
                    ": expected a tensor of ", size_, " x ", part.numel(), " elements for ", size_,
                    " ranks, got ", whole.numel());
}

void ArgumentChecks::check_pairs(const Tensors& outputs, const Tensors& inputs) const {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), backend_, ": ", name_,
                    ": expected as many outputs as inputs, got ", outputs.size(), " and ",
                    inputs.size());
}

void ArgumentChecks::check_root_list(const char* what, const TensorLists& lists, int64_t root,
                                     const at::Tensor& like) const {
  check_root(root);
  if (rank_ == root) return check_parts(what, only(lists), like, /*uneven=*/false);
  TORCH_CHECK_VALUE(lists.empty() || lists[0].empty(), backend_, ": ", name_, ": expected no ",
                    what, " tensors on rank ", rank_, ", which is not the root ", root);
}

std::vector<int64_t> ArgumentChecks::rows(const char* what, const at::Tensor& tensor,
                                          const std::vector<int64_t>& splits) const {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size_ == 0, backend_, ": ", name_, ": expected the ", what, "'s ",
                      rows, " rows to be divisible by ", size_, " ranks; pass split sizes");
    return std::vector<int64_t>(size_, rows / size_);
  }
  TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == size_, backend_, ": ", name_, ": expected ",
                    size_, " ", what, " splits, got ", splits.size());
  for (const auto split : splits) {
    TORCH_CHECK_VALUE(split >= 0, backend_, ": ", name_, ": expected ", what,
                      " splits of 0 or more rows, got ", split);
  }
  const auto total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(total == rows, backend_, ": ", name_, ": expected the ", what,
                    " splits to add up to its ", rows, " rows, got ", total);
  return splits;
}

void ArgumentChecks::check_own_part(int64_t sent, int64_t received) const {
  TORCH_CHECK_VALUE(sent == received, backend_, ": ", name_,
                    ": expected the own part to be as large going out as coming in, got ", sent,
                    " and ", received);
}

}  // namespace tessera::comm
