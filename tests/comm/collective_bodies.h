#pragma once

#include <tessera/comm.h>

#include "support/message_of.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

/// The one body of tests that every backend goes through, with ranks of every kind.
namespace tessera::collective_bodies {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// What a body runs on.
struct Setting {
  std::string backend;
  int ranks = 1;
  c10::Device device = c10::DeviceType::CPU;  // of the tensors

  /// One rank alone plays the world: every peer holds and sends what this rank does.
  bool is_fake() const { return backend == "fake"; }
  /// Sums are formed in the order of ranks, so the plain computation gives the same bits.
  bool is_ordered() const { return backend == "shm"; }
  bool is_nccl() const { return backend == "nccl"; }
  /// For tensors that collectives take.
  at::TensorOptions on(at::ScalarType dtype = at::kFloat) const {
    return at::TensorOptions(device).dtype(dtype);
  }
};

/// Called by every rank of the world.
struct Body {
  const char* name;
  void (*run)(const Setting&);
  bool has_meaning_on_fake = false;
};

// One list per file.
const std::vector<Body>& reduce_bodies();
const std::vector<Body>& move_bodies();
const std::vector<Body>& border_bodies();
const std::vector<Body>& point_bodies();
const std::vector<Body>& result_bodies();
const std::vector<Body>& layout_bodies();

extern const std::vector<at::ScalarType> kDtypes;
extern const std::vector<c10d::ReduceOp::RedOpType> kOps;
/// Whether the operation is defined for the dtype.
bool has_meaning(at::ScalarType dtype, c10d::ReduceOp::RedOpType op);
/// Those that the backend moves.
std::vector<at::ScalarType> dtypes(const Setting& setting);
/// What has a meaning and the backend can do: NCCL has no bitwise operations, and of complex
/// numbers only sums.
bool can_reduce(const Setting& setting, at::ScalarType dtype, c10d::ReduceOp::RedOpType op);

/// What `peer` contributes: the same on every call and every rank that asks.
at::Tensor sample(const Setting& setting, int peer, at::IntArrayRef sizes, at::ScalarType dtype,
                  int salt = 0);
/// As above for all ranks.
Tensors samples(const Setting& setting, at::IntArrayRef sizes, at::ScalarType dtype, int salt = 0);
/// Cheap small integers that differ between ranks and positions; sums of them are exact.
at::Tensor pattern(int peer, int64_t count, at::ScalarType dtype = at::kFloat);
at::Tensor pattern(const Setting& setting, int peer, int64_t count,
                   at::ScalarType dtype = at::kFloat);
/// `count` elements of a longer one, from `begin` on.
at::Tensor pattern_from(int peer, int64_t begin, int64_t count, at::ScalarType dtype = at::kFloat);

Tensors on_cpu(const Tensors& tensors);
/// The plain computation on the CPU: in the order of ranks, half types in float32 and rounded once.
at::Tensor reduced(const Setting& setting, const Tensors& inputs, c10d::ReduceOp::RedOpType op);
/// Bit for bit where the backend sums in the order of ranks, else within the dtype's tolerance.
void expect_reduced(const Setting& setting, const at::Tensor& actual, const at::Tensor& expected,
                    const std::string& label = "");
void expect_same_bits_on_all_ranks(const at::Tensor& tensor, const std::string& label = "");

/// The default group's backend for the setting's tensors: some members have other names in other
/// versions of c10d::ProcessGroup.
c10::intrusive_ptr<c10d::Backend> backend(const Setting& setting = {});
std::string bytes_of(const at::Tensor& tensor);

using testing::message_of;

}  // namespace tessera::collective_bodies
